// What a format of KV means: how a token's K and V are kept, how a query meets keys, how weights meet values.
//
// Each format names the numbers in a unit (PER_UNIT), the words of weights that a unit of V meets (WORDS), and what sums
// are kept in (Sum). A query is its units and, of bytes, two words behind them: its scale, and minus 128 times its sum.
#pragma once
#include "kv.h"
#include "rows.h"

namespace shoal {

constexpr int MAX_DIM = 256;

// fp32 or bf16: sums in fp32, weights in the format of the values.
template <class Unit>
struct FloatKv {
    static constexpr int PER_UNIT = Unit::PER_UNIT, WORDS = 1;
    static constexpr bool SCALED = false;
    typedef vf Sum;

    static int query_words(int dim) { return dim / PER_UNIT; }

    static void pack_query(const float* x, int dim, uint32_t* to) {
        for (int d = 0; d < dim; d++) reinterpret_cast<typename Unit::Value*>(to)[d] = Unit::of(x[d]);
    }

    // `last` = no later token is written with it: its partner in a unit of V is zeroed, for what was there meets a
    // probability of zero, and 0 x NaN is NaN.
    static void write(const Kv& kv, uint8_t* k, uint8_t* v, int offset, const float* key, const float* value,
                      bool last) {
        typedef typename Unit::Value Value;
        constexpr int P = PER_UNIT;
        auto* ks = reinterpret_cast<Value*>(k);
        for (int d = 0; d < kv.dim; d++) ks[(size_t(d / P) * BLOCK + offset) * P + d % P] = Unit::of(key[d]);
        auto* vs = reinterpret_cast<Value*>(v) + size_t(offset / P) * kv.dim * P;
        for (int d = 0; d < kv.dim; d++) vs[d * P + offset % P] = Unit::of(value[d]);
        if (P == 2 && last && offset % 2 == 0)
            for (int d = 0; d < kv.dim; d++) vs[d * P + 1] = 0;
    }

    static vf first_score(const uint32_t*) { return vf{}; }
    static vf meet(vf sum, vu keys, uint32_t query) { return Unit::dot(sum, keys, query); }
    static vf score(vf sum, const uint32_t*, const float*) { return sum; }

    struct Weights {
        uint32_t* to;
        float scale = 1;
        Weights(uint32_t* to, float) : to(to) {}
        vf put(int k, vf w, vf) const {
            Unit::store_units(to + k / PER_UNIT, w);
            return vf{};
        }
    };
    static vu values(vu unit, int) { return unit; }
    static vf weigh(vf sum, vu values, uint32_t weights) { return Unit::dot(sum, values, weights); }
    static vf weighed(vf sum, float) { return sum; }
};

// Hadamard's transform of each run of numbers in a row: as long as the largest power of two that divides their count,
// which is returned. Products of two rows grow by as much. `x` has room for whole registers.
inline int hadamard(float* x, int count) {
    const int run = count & -count;
    for (int h = 1; h < std::min(run, LANES); h *= 2) {
        const vi lanes = lane_numbers(), partners = lanes ^ h;
        const vf signs = (lanes & h) == 0 ? broadcast(1.0f) : broadcast(-1.0f);
        for (int i = 0; i < count; i += LANES) store(x + i, fma(load(x + i), signs, permuted(load(x + i), partners)));
    }
    for (int h = LANES; h < run; h *= 2)
        for (int i = 0; i < count; i += LANES) {
            if (i & h) continue;
            const vf a = load(x + i), b = load(x + i + h);
            store(x + i, a + b), store(x + i + h, a - b);
        }
    return run;
}

// Bytes, a scale a token and head (kv.h). Queries are bytes too, with a scale each, so a score is an exact integer times
// two scales (as in SageAttention, Zhang et al. 2024). Some dimensions of keys and queries are far larger than the rest:
// both are spread over all by Hadamard's transform first, which leaves scores as they are (as in QuaRot, Ashkboos et al.
// 2024; a quarter of the divergence from fp32 is left). A weight takes its value's scale along and is kept in 16 bits, as
// a share of the largest scale that its row sees in the segment: sums of value times weight fit into int32, and are exact.
struct ByteKv {
    static constexpr int PER_UNIT = 4, WORDS = 2;
    static constexpr bool SCALED = true;
    static constexpr float MOST_WEIGHT = 32767;
    typedef vi Sum;

    static int query_words(int dim) { return dim / PER_UNIT + 2; }

    static void pack_query(const float* x, int dim, uint32_t* to) {
        int8_t bytes[MAX_DIM];
        float query[MAX_DIM + LANES] = {};
        memcpy(query, x, dim * sizeof(float));
        const float run = float(hadamard(query, dim));
        const Quantized quantized = quantize(query, dim, bytes);
        const int32_t first = -128 * quantized.sum;
        const float scale = quantized.scale / run;
        memcpy(to, bytes, dim);
        memcpy(to + dim / 4, &scale, 4);
        memcpy(to + dim / 4 + 1, &first, 4);
    }

    static void write(const Kv& kv, uint8_t* k, uint8_t* v, int offset, const float* key, const float* value, bool) {
        int8_t bytes[MAX_DIM];
        float wide[MAX_DIM + LANES] = {};
        memcpy(wide, key, kv.dim * sizeof(float));
        hadamard(wide, kv.dim);
        kv.scales(k)[offset] = quantize(wide, kv.dim, bytes).scale;
        for (int d = 0; d < kv.dim; d++) bytes[d] ^= int8_t(0x80);
        for (int d = 0; d < kv.dim; d += 4) memcpy(k + (d / 4 * BLOCK + offset) * 4, bytes + d, 4);
        kv.scales(v)[offset] = quantize(value, kv.dim, bytes).scale;
        constexpr int PLACES[] = {0, 2, 1, 3};
        v += size_t(offset / 4) * kv.dim * 4 + PLACES[offset % 4];
        for (int d = 0; d < kv.dim; d++) v[d * 4] = uint8_t(bytes[d]);
    }

    static vi first_score(const uint32_t* behind) { return broadcast(int32_t(behind[1])); }
    static vi meet(vi sum, vu keys, uint32_t query) { return dot4(sum, weights4(keys), activations4(query)); }
    static vf score(vi sum, const uint32_t* behind, const float* scales) {
        float scale;
        memcpy(&scale, behind, 4);
        return to_float(sum) * scale * load(scales);
    }

    // Weights of up to 1 of values whose scales are up to `largest`. `put` returns what is NaN if a value was.
    struct Weights {
        int16_t* to;
        float scale, inverse;
        Weights(uint32_t* to, float largest)
            : to(reinterpret_cast<int16_t*>(to)),
              scale(largest / MOST_WEIGHT),
              inverse(largest > 0 ? MOST_WEIGHT / largest : 0.0f) {}
        vf put(int k, vf w, vf scale) const {
            const vf scaled = w * scale;
            store_words(to + k, rounded(scaled * inverse));
            return scaled;
        }
    };

    // Values of tokens 0 and 1 of a unit, or of 2 and 3, in 16 bits.
    static vu values(vu unit, int word) { return word ? (vu)((Words)unit >> 8) : (vu)((Words)(unit << 8) >> 8); }
    static vi weigh(vi sum, vu values, uint32_t weights) { return dot2(sum, values, weights); }
    static vf weighed(vi sum, float scale) { return to_float(sum) * scale; }
};

}  // namespace shoal
