// Work on single rows: embedding, RMS norm, packing for a linear layer, rotary embedding with the write to KV.
//
// Rows of fp32 have a stride that is a multiple of K_STEP; what is beyond their width is zero and stays so.
#pragma once
#include "linear.h"

namespace shoal {

// Columns of a row that a task takes: multiples of K_STEP.
struct Columns {
    int begin, end;
};

struct Rows {
    int width, stride;
    Memory data;
    Rows(int rows, int width) : width(width), stride(rounded_up(width, K_STEP)), data(size_t(rows) * stride * 4) {}
    float* row(int i) const { return data.as<float>() + size_t(i) * stride; }
};

// 1 / rms(x), the sum of squares in fp32 by lanes.
inline float inverse_rms(const float* x, int width, int stride, float eps) {
    vf squares{};
    for (int i = 0; i < stride; i += LANES) {
        vf v = load(x + i);
        squares = fma(v, v, squares);
    }
    return 1.0f / std::sqrt(sum_lanes(squares) / float(width) + eps);
}

template <class Unit>
inline void pack_floats(const float* x, Columns columns, int row, const Packed& out, int k) {
    uint32_t* units = out.row_units(row, k);
    constexpr int COUNT = LANES / Unit::PER_UNIT;
    for (int i = columns.begin; i < columns.end; i += LANES) {
        uint32_t values[COUNT];
        Unit::store_units(values, load(x + i));
        for (int u = 0; u < COUNT; u++) units[size_t(i / Unit::PER_UNIT + u) * TILE] = values[u];
    }
}

// Symmetric int8: numbers are bytes times `scale`, max |x| / 127; `sum` is that of the bytes.
struct Quantized {
    float scale;
    int32_t sum;
};

// Infinity and NaN must not be rounded away: they make the scale NaN.
inline Quantized quantize(const float* x, int count, int8_t* to) {
    vf most{}, unusable{};
    for (int i = 0; i < count; i += LANES) {
        vf v = load(x + i, count - i);
        most = larger(most, absolute(v));
        unusable += v - v;
    }
    const float peak = max_lanes(most), inverse = peak > 0 ? 127.0f / peak : 0.0f;
    vi total{};
    for (int i = 0; i < count; i += LANES) {
        vi q = rounded(load(x + i, count - i) * inverse);
        total += q;
        int8_t bytes[LANES];
        store_bytes(bytes, q);
        memcpy(to + i, bytes, std::min(LANES, count - i));
    }
    return {peak / 127.0f + sum_lanes(unusable), sum_lanes(total)};
}

// A scale for each group.
inline void pack_bytes(const float* x, Columns columns, int row, const Packed& out, int k) {
    uint32_t* units = out.row_units(row, k);
    float* scales = out.row_scales(row, k);
    for (int first = columns.begin, g = first / GROUP; first < columns.end; first += GROUP, g++) {
        int8_t bytes[GROUP];
        const Quantized group = quantize(x + first, GROUP, bytes);
        for (int u = 0; u < GROUP / 4; u++) memcpy(&units[size_t(first / 4 + u) * TILE], bytes + 4 * u, 4);
        scales[g * TILE] = group.scale;
        if (out.format == Format::int8)
            out.row_sums<int32_t>(row, k)[g * TILE] = -128 * group.sum;
        else
            out.row_sums<float>(row, k)[g * TILE] = group.scale * float(group.sum);
    }
}

inline void pack_row(const float* x, Columns columns, int row, const Packed& out, int k) {
    switch (out.format) {
        case Format::fp32: return pack_floats<Fp32>(x, columns, row, out, k);
        case Format::bf16: return pack_floats<Bf16>(x, columns, row, out, k);
        default: return pack_bytes(x, columns, row, out, k);
    }
}

// Columns of x / rms(x) * weight, packed; `scratch` holds a row.
inline void norm_row(const float* x, const float* weight, float eps, const Rows& like, Columns columns, int row,
                     const Packed& out, float* scratch) {
    float inverse = inverse_rms(x, like.width, like.stride, eps);
    for (int i = columns.begin; i < columns.end; i += LANES) store(scratch + i, load(x + i) * inverse * load(weight + i));
    pack_row(scratch, columns, row, out, like.width);
}

inline vf silu(vf x) { return x / (exponential(-x) + 1.0f); }

// Turns the head's halves against each other by the row's angles: half-split ("NEOX") form.
inline void rotate(float* head, const float* cos, const float* sin, int dim) {
    for (int i = 0; i < dim / 2; i++) {
        float a = head[i], b = head[i + dim / 2];
        head[i] = a * cos[i] - b * sin[i];
        head[i + dim / 2] = b * cos[i] + a * sin[i];
    }
}

}  // namespace shoal
