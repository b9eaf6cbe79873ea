// The pool of KV blocks: [block][layer]{K, V} of 16 tokens each, laid out as attention reads them.
//
//     K  [kv head][unit of head_dim][16 tokens]       a unit is one fp32 or two bf16
//     V  [kv head][unit of tokens][head_dim]          so that lanes are tokens for K, dimensions for V
//
// A register of V may reach beyond a head of an odd size; what they find there is never used.
#pragma once
#include "memory.h"
#include "vec.h"

namespace shoal {

constexpr int BLOCK = 16;  // tokens

struct Kv {
    int blocks, layers, heads, dim, padded_dim, value_bytes;
    size_t k_head_bytes, v_head_bytes, layer_bytes, block_bytes;
    Memory data;

    Kv(int blocks, int layers, int heads, int dim, bool bf16)
        : blocks(blocks),
          layers(layers),
          heads(heads),
          dim(dim),
          padded_dim(rounded_up(dim, 16)),
          value_bytes(bf16 ? 2 : 4),
          k_head_bytes(size_t(dim) * BLOCK * value_bytes),
          v_head_bytes(k_head_bytes),
          layer_bytes(heads * (k_head_bytes + v_head_bytes)),
          block_bytes(layers * layer_bytes),
          data(blocks * block_bytes + 64) {}

    uint8_t* k(int block, int layer, int head) const {
        return data.as<uint8_t>() + block * block_bytes + layer * layer_bytes + head * k_head_bytes;
    }
    uint8_t* v(int block, int layer, int head) const { return k(block, layer, 0) + heads * k_head_bytes + head * v_head_bytes; }

    // Stores a token's K (already turned) and V. `last` = no later token is written with it: its partner in a unit of V
    // is zeroed, for what was there meets a probability of zero, and 0 x NaN is NaN.
    template <class Unit>
    void write(int block, int offset, int layer, int head, const float* key, const float* value, bool last) const {
        typedef typename Unit::Value Value;
        constexpr int P = Unit::PER_UNIT;
        auto* ks = reinterpret_cast<Value*>(k(block, layer, head));
        for (int d = 0; d < dim; d++) ks[(size_t(d / P) * BLOCK + offset) * P + d % P] = Unit::of(key[d]);
        auto* vs = reinterpret_cast<Value*>(v(block, layer, head)) + size_t(offset / P) * dim * P;
        for (int d = 0; d < dim; d++) vs[d * P + offset % P] = Unit::of(value[d]);
        if (P == 2 && last && offset % 2 == 0)
            for (int d = 0; d < dim; d++) vs[d * P + 1] = 0;
    }
};

}  // namespace shoal
