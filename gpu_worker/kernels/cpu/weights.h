// The four formats of weights, and of the rows that meet them. Weights are packed once; rows by whoever makes them
// (rows.h).
//
// Packed weights: outputs go in pairs of panels of 16; for each pair one stream, in the order the kernel reads it:
//     fp32   [K]     [2][16]           units of one fp32
//     bf16   [K/2]   [2][16][2]        units of two bf16
//     int8   [K/4]   [2][16][4]        units of four bytes, w / scale + 128, one scale an output
//     int4   [K/32] {[4][2][16][4] nibbles, fp16 step [2][16], fp16 least [2][16]}   w = step * nibble + least
// Packed rows: tiles of TILE rows, [tile][unit][TILE], so that a kernel walks one pointer.
//
// The quantized formats take rows as int8 with a scale for each group of inputs of each row: with one scale for a whole
// row a single large input costs all others their precision (perplexity +0.6 instead of +0.1, docs/benchmarks.md).
//
// A result depends on its own row and on nothing else: sums over K run in one order whatever the number of rows; those
// within a group are exact in int32.
#pragma once
#include <algorithm>
#include <cmath>

#include "memory.h"
#include "vec.h"

namespace shoal {

enum class Format { fp32 = 0, bf16 = 1, int8 = 2, int4 = 3 };

constexpr int PANEL = 16;           // outputs
constexpr int PAIR = 2 * PANEL;     // outputs of a pair of panels
constexpr int REGS = PAIR / LANES;  // registers that hold one unit of each
constexpr int GROUP = 32;        // inputs of a row that share a scale, weights of an output that share an int4 step
constexpr int NIBBLE_BYTES = PAIR * GROUP / 2;           // of a group of a pair of panels of int4
constexpr int INT4_BYTES = NIBBLE_BYTES + 2 * PAIR * 2;  // with steps and least values
constexpr int K_STEP = 64;       // rows are padded with zeros to a multiple
constexpr int AHEAD = 6144;      // how far before its use a byte of weights is fetched
#ifdef __AVX512F__
constexpr int TILE = 12;  // rows: two registers of sums for each, and some to spare
#else
constexpr int TILE = 2;
#endif

inline int per_unit(Format f) { return f == Format::fp32 ? 1 : f == Format::bf16 ? 2 : 4; }

inline bool quantized(Format f) { return f == Format::int8 || f == Format::int4; }

// Rows in the form that a linear layer of one format reads, in tiles like the units.
struct Packed {
    Format format;
    Memory units;   // uint32 [tiles][units][TILE]
    Memory scales;  // float [tiles][groups][TILE]
    Memory sums;    // [tiles][groups][TILE]: int8: int32 -128 * sum of a group's numbers; int4: float sum of its values

    Packed(Format f, int rows, int k)
        : format(f),
          units(size_t(rounded_up(rows, TILE)) * rounded_up(k, K_STEP) / per_unit(f) * 4),
          scales(quantized(f) ? size_t(rounded_up(rows, TILE)) * rounded_up(k, K_STEP) / GROUP * 4 : 0),
          sums(quantized(f) ? size_t(rounded_up(rows, TILE)) * rounded_up(k, K_STEP) / GROUP * 4 : 0) {}

    // Where a row of k inputs has its first unit, scale or sum; the next is TILE further.
    uint32_t* row_units(int row, int k) const { return at<uint32_t>(units, row, rounded_up(k, K_STEP) / per_unit(format)); }
    float* row_scales(int row, int k) const { return at<float>(scales, row, groups(k)); }
    template <class T>
    T* row_sums(int row, int k) const {
        return at<T>(sums, row, groups(k));
    }

  private:
    int groups(int k) const { return rounded_up(k, K_STEP) / GROUP; }
    template <class T>
    static T* at(const Memory& memory, int row, int count) {
        return memory.as<T>() + size_t(row / TILE) * count * TILE + row % TILE;
    }
};

struct Weights {
    Format format;
    int n, k;       // as given
    int pairs, kp;  // pairs of panels, padded k
    size_t pair_bytes;
    Memory data;
    Memory scales;  // int8: float [pairs][2][16]
    Memory bias;    // float [pairs][2][16]

    static size_t bytes_of_pair(Format f, int kp) {
        if (f == Format::int4) return size_t(kp / GROUP) * INT4_BYTES;
        return size_t(kp) / per_unit(f) * PAIR * 4;
    }

    Weights(Format f, int n, int k)
        : format(f),
          n(n),
          k(k),
          pairs((n + PAIR - 1) / PAIR),
          kp(rounded_up(k, K_STEP)),
          pair_bytes(bytes_of_pair(f, kp)),
          data(pairs * pair_bytes),
          scales(size_t(pairs) * PAIR * sizeof(float)),
          bias(size_t(pairs) * PAIR * sizeof(float)) {}

    // Takes w [n][k] and bias [n] (or null). With `second` the panels of a pair are 16 outputs of w and 16 of second.
    void pack(const float* w, const float* second, const float* b, const float* b2);

  private:
    void pack_output(int pair, int lane, const float* row);
};

inline void Weights::pack(const float* w, const float* second, const float* b, const float* b2) {
    int per_pair = second ? PANEL : PAIR;
    int rows = second ? n / 2 : n;
    for (int o = 0; o < rows; o++) {
        int pair = o / per_pair, lane = o % per_pair;
        pack_output(pair, lane, w + size_t(o) * k);
        if (b) bias.as<float>()[pair * PAIR + lane] = b[o];
        if (!second) continue;
        pack_output(pair, lane + PANEL, second + size_t(o) * k);
        if (b2) bias.as<float>()[pair * PAIR + lane + PANEL] = b2[o];
    }
    if (format != Format::int8) return;
    auto* units = data.as<uint8_t>();  // outputs that only fill a pair up: zero, which is 128 here
    for (int pair = 0; pair < pairs; pair++)
        for (int lane = 0; lane < PAIR; lane++)
            if (scales.as<float>()[pair * PAIR + lane] == 0)
                for (int u = 0; u < kp / 4; u++) memset(units + pair * pair_bytes + (size_t(u) * PAIR + lane) * 4, 128, 4);
}

inline void Weights::pack_output(int pair, int lane, const float* row) {
    uint8_t* base = data.as<uint8_t>() + pair * pair_bytes;
    if (format == Format::fp32) {
        for (int i = 0; i < k; i++) reinterpret_cast<float*>(base)[size_t(i) * PAIR + lane] = row[i];
    } else if (format == Format::bf16) {
        for (int i = 0; i < k; i++)
            reinterpret_cast<uint16_t*>(base)[(size_t(i / 2) * PAIR + lane) * 2 + i % 2] = to_bf16(row[i]);
    } else if (format == Format::int8) {
        float most = 0;
        for (int i = 0; i < k; i++) most = std::max(most, std::fabs(row[i]));
        float scale = most > 0 ? most / 127 : 1;
        scales.as<float>()[pair * PAIR + lane] = scale;
        for (int i = 0; i < kp; i++) {
            int q = i < k ? int(std::nearbyint(row[i] / scale)) : 0;
            base[(size_t(i / 4) * PAIR + lane) * 4 + i % 4] = uint8_t(std::min(127, std::max(-127, q)) + 128);
        }
    } else {
        for (int g = 0; g < kp / GROUP; g++) {
            uint8_t* record = base + g * INT4_BYTES;
            int first = g * GROUP, last = std::min(k, first + GROUP);
            float least = 0, most = 0;
            if (first < k) least = most = row[first];
            for (int i = first; i < last; i++) least = std::min(least, row[i]), most = std::max(most, row[i]);
            uint16_t step16 = to_fp16((most - least) / 15), least16 = to_fp16(least);
            float step = from_fp16(step16), base_value = from_fp16(least16);
            reinterpret_cast<uint16_t*>(record + NIBBLE_BYTES)[lane] = step16;
            reinterpret_cast<uint16_t*>(record + NIBBLE_BYTES)[PAIR + lane] = least16;
            for (int i = first; i < last; i++) {
                int q = step > 0 ? int(std::nearbyint((row[i] - base_value) / step)) : 0;
                q = std::min(15, std::max(0, q));
                int unit = (i - first) / 4;  // 8 units of 4; two share the bytes of a load: low and high nibbles
                record[((unit / 2) * PAIR + lane) * 4 + i % 4] |= uint8_t(unit % 2 ? q << 4 : q);
            }
        }
    }
}

}  // namespace shoal
