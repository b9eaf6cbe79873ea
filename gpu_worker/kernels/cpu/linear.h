// y = x W^T for rows x, in four formats of W (weights.h): tiles of rows by pairs of panels, sums in registers.
#pragma once
#include "weights.h"

namespace shoal {

// A unit's weights, some time before they are read.
inline void fetch_ahead(const uint8_t* p) {
    for (int line = 0; line < PAIR * 4; line += 64) __builtin_prefetch(p + AHEAD + line);
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
        fetch_ahead(p);
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
            fetch_ahead(p);
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
            fetch_ahead(p + j * PAIR * 4);
            SHOAL_UNROLL
            for (int i = 0; i < REGS; i++) {
                vu nibbles = load_units(p + j * PAIR * 4 + i * sizeof(vu));
                Weights4 low = weights4(nibbles & 0x0f0f0f0fu), high = weights4(nibbles >> 4 & 0x0f0f0f0fu);
                SHOAL_UNROLL
                for (int r = 0; r < R; r++)
                    sum[r][i] = dot4(dot4(sum[r][i], low, activations4(x[r])), high, activations4(x[r + TILE]));
            }
        }
        fetch_ahead(p + NIBBLE_BYTES);
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
