// The pool of KV blocks: [block][layer]{K, V} of 16 tokens each, laid out as attention reads them.
//
//     K  [kv head][unit of head_dim][16 tokens]       a unit is 32 bits: one fp32, two bf16 or four bytes
//     V  [kv head][unit of tokens][head_dim]          so that lanes are tokens for K, dimensions for V
//
// Bytes are x / scale; behind each head's K and V are 16 scales in fp32, one a token: max |x| / 127. K is kept 128 too
// large, and so without a sign; a unit of V holds its tokens in the order 0, 2, 1, 3, for ByteKv::values.
// A register of V may reach beyond a head of an odd size; what they find there is never used.
#pragma once
#include "memory.h"
#include "weights.h"

namespace shoal {

constexpr int BLOCK = 16;  // tokens

struct Kv {
    Format format;
    int blocks, layers, heads, dim, padded_dim, value_bytes;
    size_t head_bytes, layer_bytes, block_bytes;
    Memory data;

    Kv(Format format, int blocks, int layers, int heads, int dim)
        : format(format),
          blocks(blocks),
          layers(layers),
          heads(heads),
          dim(dim),
          padded_dim(rounded_up(dim, 16)),
          value_bytes(4 / per_unit(format)),
          head_bytes(size_t(dim) * BLOCK * value_bytes + (format == Format::int8 ? BLOCK * sizeof(float) : 0)),
          layer_bytes(2 * heads * head_bytes),
          block_bytes(layers * layer_bytes),
          data(blocks * block_bytes + 64) {}

    uint8_t* k(int block, int layer, int head) const {
        return data.as<uint8_t>() + block * block_bytes + layer * layer_bytes + head * head_bytes;
    }
    uint8_t* v(int block, int layer, int head) const { return k(block, layer, heads + head); }

    // The scales of a head's block of K or V, of bytes: a token each.
    float* scales(uint8_t* head) const { return reinterpret_cast<float*>(head + dim * BLOCK); }
};

}  // namespace shoal
