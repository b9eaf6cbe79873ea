// The library's functions, as gpu_worker/kernels/program.py calls them.
//
// Whoever knows the architecture (gpu_worker/models) adds the operations once, in order; each step then costs one call
// from Python. Handles are pointers; what was made by `shoal_*_new` is freed by its `shoal_*_free`.
#include "operations.h"

using namespace shoal;

#define API extern "C" __attribute__((visibility("default")))

API const char* shoal_instructions() {
#if defined(__AVX512BF16__) && defined(__AVX512VNNI__)
    return "avx512-bf16-vnni";
#elif defined(__AVX512VNNI__)
    return "avx512-vnni";
#elif defined(__AVX512F__)
    return "avx512";
#else
    return "avx2";
#endif
}

API Weights* shoal_weights_new(int format, int n, int k, const float* w, const float* second, const float* bias,
                               const float* second_bias) {
    auto* made = new Weights(Format(format), n, k);
    made->pack(w, second, bias, second_bias);
    return made;
}
API void shoal_weights_free(Weights* w) { delete w; }

API Kv* shoal_kv_new(int format, int blocks, int layers, int heads, int dim) {
    return new Kv(Format(format), blocks, layers, heads, dim);
}
API void shoal_kv_free(Kv* kv) { delete kv; }
API void* shoal_kv_data(Kv* kv) { return kv->data.as<void>(); }
API size_t shoal_kv_block_bytes(Kv* kv) { return kv->block_bytes; }

API Rows* shoal_rows_new(int rows, int width) { return new Rows(rows, width); }
API void shoal_rows_free(Rows* rows) { delete rows; }
API float* shoal_rows_data(Rows* rows) { return rows->data.as<float>(); }
API int shoal_rows_stride(Rows* rows) { return rows->stride; }

API Packed* shoal_packed_new(int format, int rows, int k) { return new Packed(Format(format), rows, k); }
API void shoal_packed_free(Packed* packed) { delete packed; }

API Program* shoal_program_new(int threads, int spins, int max_rows, int max_logits) {
    return new Program(threads, spins, max_rows, max_logits);
}
API void shoal_program_free(Program* p) { delete p; }

API void shoal_embed(Program* p, const uint16_t* bf16, const float* fp32, int width, Rows* x) {
    p->operations.push_back(by_rows(OTHER, all_rows, [=](Batch& b, int row) {
        float* to = x->row(row);
        const size_t from = size_t(b.tokens[row]) * width;
        for (int i = 0; i < width; i++) to[i] = fp32 ? fp32[from + i] : from_bf16(bf16[from + i]);
    }));
}

// part: 0 before attention, 1 before the feed-forward, 3 before the head (then rows are those that need logits).
API void shoal_norm(Program* p, int part, const Rows* x, const float* weight, float eps, const Packed* out) {
    const bool head = part == OTHER;
    p->operations.push_back(by_tiles(Part(part), head ? logit_rows : all_rows, x, [=](Batch& b, int row, Columns columns) {
        static thread_local std::vector<float> scratch;
        if (int(scratch.size()) < x->stride) scratch.resize(x->stride);
        norm_row(x->row(head ? b.logit_rows[row] : row), weight, eps, *x, columns, row, *out, scratch.data());
    }));
}

API void shoal_pack(Program* p, int part, const Rows* x, const Packed* out) {
    p->operations.push_back(by_tiles(Part(part), all_rows, x, [=](Batch&, int row, Columns columns) {
        pack_row(x->row(row), columns, row, *out, x->width);
    }));
}

// out = in W^T + bias, or out += with `add`; part 3 = the head.
API void shoal_linear(Program* p, int part, const Packed* in, const Weights* w, Rows* out, int add) {
    auto rows = part == OTHER ? logit_rows : all_rows;
    auto set = [=](int row, int pair, const vf* x) {
        float* to = out->row(row) + size_t(pair) * PAIR;
        for (int i = 0; i < REGS; i++) store(to + i * LANES, x[i]);
    };
    auto increase = [=](int row, int pair, const vf* x) {
        float* to = out->row(row) + size_t(pair) * PAIR;
        for (int i = 0; i < REGS; i++) store(to + i * LANES, load(to + i * LANES) + x[i]);
    };
    p->operations.push_back(add ? linear(Part(part), in, w, rows, increase) : linear(Part(part), in, w, rows, set));
}

// out = silu(gate) * up, where w's pairs hold 16 outputs of each.
API void shoal_swiglu(Program* p, const Packed* in, const Weights* w, Rows* out) {
    p->operations.push_back(linear(FEED_FORWARD, in, w, all_rows, [=](int row, int pair, const vf* x) {
        float* to = out->row(row) + size_t(pair) * PANEL;
        for (int i = 0; i < REGS / 2; i++) store(to + i * LANES, silu(x[i]) * x[i + REGS / 2]);
    }));
}

// Turns q and k of qkv [heads + 2 kv_heads, dim], stores k and v, attends, and packs the result. `q` and `turns` are
// rows for work in between: of heads * dim and of dim numbers. Every layer of a program has the same shape.
API void shoal_attention(Program* p, const Kv* kv, int layer, int heads, float scale, const float* frequencies,
                         Rows* qkv, Rows* q, Rows* turns, Rows* out, Packed* packed) {
    p->attention = {heads, kv->heads, kv->dim, kv->padded_dim, kv->value_bytes};
    auto* units = q->data.as<uint32_t>();
    auto* angles = turns->data.as<float>();
    const auto add = [&](auto form) {
        add_attention<decltype(form)>(*p, kv, layer, qkv, units, frequencies, angles, out, scale, packed);
    };
    if (kv->format == Format::fp32) return add(FloatKv<Fp32>());
    if (kv->format == Format::bf16) return add(FloatKv<Bf16>());
    add(ByteKv());
}

API void shoal_choose(Program* p, const Rows* logits, int32_t* tokens, uint8_t* usable) {
    p->operations.push_back({SAMPLING, logit_rows, [=](Batch&, int row, int) {
                                 choose(logits->row(row), logits->width, tokens + row, usable + row);
                             }});
}

// Computes pieces of sequences, whose rows lie one after the other in `tokens`. Returns the number of rows of logits,
// or -1 if they are more than the program has room for. With `seconds` [4] they are timed by part.
API int shoal_program_run(Program* p, int pieces, const int32_t* counts, const int32_t* starts, const int32_t* offsets,
                          const int32_t* tables, const uint8_t* samples, const int32_t* tokens, double* seconds) {
    p->prepare(pieces, counts, starts, offsets, tables, samples, tokens);
    if (p->batch.rows > p->max_rows || logit_rows(p->batch) > p->max_logits) return -1;
    p->run(seconds != nullptr);
    if (seconds) memcpy(seconds, p->seconds, sizeof p->seconds);
    return logit_rows(p->batch);
}
