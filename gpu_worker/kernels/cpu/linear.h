// y = x W^T for rows x, in four formats of W. Weights are packed once; rows are packed by whoever makes them (rows.h).
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
constexpr int AHEAD = 2048;      // bytes of weights to prefetch
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

// R rows from `row` on (all in one tile) times pair of panels `pair`; emit(row, its PAIR results before bias, in REGS).
template <int R, class Unit, class Emit>
inline void float_tile(const Packed& a, const Weights& w, int row, int pair, const Emit& emit) {
    const uint32_t* x = a.row_units(row, w.k);
    const uint8_t* p = w.data.as<uint8_t>() + pair * w.pair_bytes;
    vf acc[R][REGS] = {};
    for (int u = 0; u < w.kp / Unit::PER_UNIT; u++, p += PAIR * 4, x += TILE) {
        vu part[REGS];
        SHOAL_UNROLL
        for (int i = 0; i < REGS; i++) part[i] = load_units(p + i * sizeof(vu));
        __builtin_prefetch(p + AHEAD);
        SHOAL_UNROLL
        for (int r = 0; r < R; r++)
            SHOAL_UNROLL
            for (int i = 0; i < REGS; i++) acc[r][i] = Unit::dot(acc[r][i], part[i], x[r]);
    }
    SHOAL_UNROLL
    for (int r = 0; r < R; r++) {
        vf results[REGS];  // a copy: what is handed on by pointer would not stay in registers
        SHOAL_UNROLL
        for (int i = 0; i < REGS; i++) results[i] = acc[r][i];
        emit(row + r, results);
    }
}

template <int R, class Emit>
inline void int8_tile(const Packed& a, const Weights& w, int row, int pair, const Emit& emit) {
    const uint32_t* x = a.row_units(row, w.k);
    const float* scales = a.row_scales(row, w.k);
    const int32_t* starts = a.row_sums<int32_t>(row, w.k);  // weights are stored 128 too large
    const uint8_t* p = w.data.as<uint8_t>() + pair * w.pair_bytes;
    vf acc[R][REGS] = {};
    for (int g = 0; g < w.kp / GROUP; g++, scales += TILE, starts += TILE) {
        vi sum[R][REGS] = {};
        SHOAL_UNROLL
        for (int r = 0; r < R; r++)
            SHOAL_UNROLL
            for (int i = 0; i < REGS; i++) sum[r][i] = broadcast(starts[r]);
        for (int u = 0; u < GROUP / 4; u++, p += PAIR * 4, x += TILE) {
            __builtin_prefetch(p + AHEAD);
            Activations4 one[R];
            SHOAL_UNROLL
            for (int r = 0; r < R; r++) one[r] = activations4(x[r]);
            SHOAL_UNROLL
            for (int i = 0; i < REGS; i++) {
                Weights4 part = weights4(load_units(p + i * sizeof(vu)));
                SHOAL_UNROLL
                for (int r = 0; r < R; r++) sum[r][i] = dot4(sum[r][i], part, one[r]);
            }
        }
        SHOAL_UNROLL
        for (int r = 0; r < R; r++)
            SHOAL_UNROLL
            for (int i = 0; i < REGS; i++) acc[r][i] = fma(to_float(sum[r][i]), broadcast(scales[r]), acc[r][i]);
    }
    const float* scale = w.scales.as<float>() + pair * PAIR;
    SHOAL_UNROLL
    for (int r = 0; r < R; r++) {
        vf results[REGS];
        SHOAL_UNROLL
        for (int i = 0; i < REGS; i++) results[i] = acc[r][i] * load(scale + i * LANES);
        emit(row + r, results);
    }
}

template <int R, class Emit>
inline void int4_tile(const Packed& a, const Weights& w, int row, int pair, const Emit& emit) {
    const uint32_t* x = a.row_units(row, w.k);
    const float *scales = a.row_scales(row, w.k), *totals = a.row_sums<float>(row, w.k);
    const uint8_t* p = w.data.as<uint8_t>() + pair * w.pair_bytes;
    vf acc[R][REGS] = {};
    for (int g = 0; g < w.kp / GROUP; g++, p += INT4_BYTES, scales += TILE, totals += TILE) {
        vi sum[R][REGS] = {};
        for (int j = 0; j < GROUP / 8; j++, x += 2 * TILE) {
            __builtin_prefetch(p + j * PAIR * 4 + AHEAD);
            SHOAL_UNROLL
            for (int i = 0; i < REGS; i++) {
                vu nibbles = load_units(p + j * PAIR * 4 + i * sizeof(vu));
                Weights4 low = weights4(nibbles & 0x0f0f0f0fu), high = weights4(nibbles >> 4 & 0x0f0f0f0fu);
                SHOAL_UNROLL
                for (int r = 0; r < R; r++)
                    sum[r][i] = dot4(dot4(sum[r][i], low, activations4(x[r])), high, activations4(x[r + TILE]));
            }
        }
        const uint8_t* steps = p + NIBBLE_BYTES;
        SHOAL_UNROLL
        for (int i = 0; i < REGS; i++) {
            vf step = load_fp16(steps + i * LANES * 2), least = load_fp16(steps + PAIR * 2 + i * LANES * 2);
            SHOAL_UNROLL
            for (int r = 0; r < R; r++) {
                acc[r][i] = fma(to_float(sum[r][i]), step * broadcast(scales[r]), acc[r][i]);
                acc[r][i] = fma(least, broadcast(totals[r]), acc[r][i]);
            }
        }
    }
    SHOAL_UNROLL
    for (int r = 0; r < R; r++) {
        vf results[REGS];
        SHOAL_UNROLL
        for (int i = 0; i < REGS; i++) results[i] = acc[r][i];
        emit(row + r, results);
    }
}

// The quantized formats keep two sums for each result, so their tiles are half as high.
constexpr int HALF_TILE = (TILE + 1) / 2;
inline int tile_rows(Format f) { return quantized(f) ? HALF_TILE : TILE; }

template <int R, class Emit>
inline void tile(const Packed& a, const Weights& w, int row, int pair, const Emit& emit) {
    switch (w.format) {
        case Format::fp32: return float_tile<R, Fp32>(a, w, row, pair, emit);
        case Format::bf16: return float_tile<R, Bf16>(a, w, row, pair, emit);
        case Format::int8:
            if constexpr (R <= HALF_TILE) return int8_tile<R>(a, w, row, pair, emit);
            break;
        case Format::int4:
            if constexpr (R <= HALF_TILE) return int4_tile<R>(a, w, row, pair, emit);
    }
}

template <class Emit>
inline void tile_of(int rows, const Packed& a, const Weights& w, int row, int pair, const Emit& emit) {
    switch (rows) {
        case 1: return tile<1>(a, w, row, pair, emit);
        case 2: return tile<2>(a, w, row, pair, emit);
#ifdef __AVX512F__
        case 3: return tile<3>(a, w, row, pair, emit);
        case 4: return tile<4>(a, w, row, pair, emit);
        case 5: return tile<5>(a, w, row, pair, emit);
        case 6: return tile<6>(a, w, row, pair, emit);
        case 7: return tile<7>(a, w, row, pair, emit);
        case 8: return tile<8>(a, w, row, pair, emit);
        case 9: return tile<9>(a, w, row, pair, emit);
        case 10: return tile<10>(a, w, row, pair, emit);
        case 11: return tile<11>(a, w, row, pair, emit);
        case 12: return tile<12>(a, w, row, pair, emit);
#endif
    }
}

// Rows [first, last) times pairs [pair, end); emit(row, pair, its PAIR results in REGS).
template <class Emit>
inline void block(const Packed& a, const Weights& w, int first, int last, int pair, int end, const Emit& emit) {
    const int high = tile_rows(w.format);
    for (; pair < end; pair++) {
        const float* bias = w.bias.as<float>() + pair * PAIR;
        for (int row = first; row < last; row += high)
            tile_of(std::min(high, last - row), a, w, row, pair, [&](int r, vf* x) {
                SHOAL_UNROLL
                for (int i = 0; i < REGS; i++) x[i] = x[i] + load(bias + i * LANES);
                emit(r, pair, x);
            });
    }
}

}  // namespace shoal
