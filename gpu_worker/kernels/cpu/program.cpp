// A decoder as a list of operations over named rows, run by a team of threads in one call per step.
//
// Whoever knows the architecture (gpu_worker/models) adds the operations once, in order; each step then costs one call
// from Python. Handles are pointers; what was made by `shoal_*_new` is freed by its `shoal_*_free`.
#include <chrono>
#include <string>

#include "attention.h"
#include "threads.h"

namespace shoal {

enum Part { ATTENTION = 0, FEED_FORWARD = 1, SAMPLING = 2, OTHER = 3, PARTS = 4 };

// What one call computes. Rows are packed: piece by piece.
struct Batch {
    int rows = 0;
    std::vector<Piece> pieces;
    std::vector<int> position, row_piece, logit_rows, split;
    const int32_t* tokens = nullptr;
    std::vector<AttentionTask> tasks;
    std::vector<float> partials;
    int partial_segments = 0;
};

struct Operation {
    Part part;
    std::function<int(const Batch&)> tasks;
    std::function<void(Batch&, int task, int thread)> run;
};

class Program {
  public:
    Program(int threads, int spins, int max_rows, int max_logits)
        : team(threads, spins), max_rows(max_rows), max_logits(max_logits), memory(threads) {}

    Team team;
    const int max_rows, max_logits;
    std::vector<TileMemory> memory;
    std::vector<Operation> operations;
    Batch batch;
    AttentionShape attention{};
    double seconds[PARTS] = {};

    void run(bool timed) {
        std::unique_ptr<std::atomic<int>[]> next(new std::atomic<int>[operations.size()]);
        for (size_t i = 0; i < operations.size(); i++) next[i] = 0;
        std::fill(seconds, seconds + PARTS, 0.0);
        team.together([&](int thread) {
            auto before = std::chrono::steady_clock::now();
            for (size_t i = 0; i < operations.size(); i++) {
                const Operation& one = operations[i];
                const int tasks = one.tasks(batch);
                if (!tasks) continue;
                for (int task = next[i]++; task < tasks; task = next[i]++) one.run(batch, task, thread);
                team.wait_for_all();
                if (!timed || thread) continue;
                auto now = std::chrono::steady_clock::now();
                seconds[one.part] += std::chrono::duration<double>(now - before).count();
                before = now;
            }
        });
    }

    void prepare(int pieces, const int32_t* counts, const int32_t* starts, const int32_t* offsets,
                 const int32_t* tables, const uint8_t* samples, const int32_t* tokens) {
        batch.pieces.clear(), batch.position.clear(), batch.row_piece.clear(), batch.logit_rows.clear();
        batch.tasks.clear(), batch.split.clear();
        batch.tokens = tokens;
        batch.rows = batch.partial_segments = 0;
        for (int i = 0; i < pieces; i++) {
            Piece p{batch.rows, counts[i], starts[i], tables + offsets[i], bool(samples[i]), batch.partial_segments};
            for (int t = 0; t < p.count; t++) batch.position.push_back(p.start + t), batch.row_piece.push_back(i);
            batch.rows += p.count;
            if (p.samples) batch.logit_rows.push_back(batch.rows - 1);
            if (p.split()) batch.partial_segments += p.segments(), batch.split.push_back(i);
            batch.pieces.push_back(p);
        }
        if (attention.heads) plan_attention();
    }

  private:
    void plan_attention() {
        const int group = attention.group(), heads = std::min(group, TILE_ROWS);
        batch.partials.resize(size_t(batch.partial_segments) * attention.heads * (attention.padded_dim + 2));
        for (int i = 0; i < int(batch.pieces.size()); i++) {
            const Piece& p = batch.pieces[i];
            const int step = p.split() ? SPLIT_SEGMENTS : p.segments();
            const int queries = std::max(1, TILE_ROWS / heads);
            for (int first = (p.count - 1) / queries * queries; first >= 0; first -= queries)  // heaviest first
                for (int kv_head = 0; kv_head < attention.kv_heads; kv_head++)
                    for (int h = 0; h < group; h += heads) {
                        const int n = std::min(queries, p.count - first);
                        const int segments = (p.start + first + n + SEGMENT - 1) / SEGMENT;
                        for (int s = 0; s < segments; s += step)
                            batch.tasks.push_back({i, kv_head, h, std::min(heads, group - h), first, n, s,
                                                   std::min(segments, s + step)});
                    }
        }
    }
};

// Rows of a task: whole tiles, and of long pieces whole blocks, for two threads that write to the same lines of the cache
// are slower than one. Few rows are cut by columns instead.
constexpr int FEW_ROWS = TILE > 12 ? TILE : 12, MANY_ROWS = 4 * FEW_ROWS;
constexpr int COLUMN_PARTS = 4;
inline int rows_per_task(int rows) { return rows < 8 * MANY_ROWS ? FEW_ROWS : MANY_ROWS; }
inline int column_parts(int rows) { return rows < 8 * FEW_ROWS && rows > 1 ? COLUMN_PARTS : 1; }

constexpr int ROW_BLOCK = 20 * TILE;       // rows that stay in a core's cache while weights pass by
constexpr double TASK_PRODUCTS = 2.5e6;    // of a linear layer's task: some microseconds
constexpr double TASK_BYTES = 160e3;

inline int blocks_of(int rows, int size) { return (rows + size - 1) / size; }

// How many pairs of panels a task takes for so many rows.
inline int pairs_per_task(const Weights& w, int rows) {
    double products = double(std::min(rows, ROW_BLOCK)) * PAIR * w.kp;
    double cost = std::max(products / TASK_PRODUCTS, double(w.pair_bytes) / TASK_BYTES);
    return std::max(1, int(1 / cost));
}

template <class Emit>
Operation linear(Part part, const Packed* in, const Weights* w, std::function<int(const Batch&)> rows, Emit emit) {
    auto groups = [w](int n) { return blocks_of(w->pairs, pairs_per_task(*w, n)); };
    return {part, [=](const Batch& b) { return blocks_of(rows(b), ROW_BLOCK) * groups(rows(b)); },
            [=](Batch& b, int task, int) {
                const int n = rows(b), step = pairs_per_task(*w, n);
                const int first = task / groups(n) * ROW_BLOCK, pair = task % groups(n) * step;
                block(*in, *w, first, std::min(n, first + ROW_BLOCK), pair, std::min(w->pairs, pair + step), emit);
            }};
}

inline int all_rows(const Batch& b) { return b.rows; }
inline int logit_rows(const Batch& b) { return int(b.logit_rows.size()); }

// Calls go(batch, row) for the rows of a task.
template <class Go>
Operation by_rows(Part part, int (*rows)(const Batch&), Go go) {
    auto step = [=](const Batch& b) { return rows(b) <= 8 * FEW_ROWS ? 1 : rows_per_task(rows(b)); };
    return {part, [=](const Batch& b) { return blocks_of(rows(b), step(b)); },
            [=](Batch& b, int task, int) {
                const int last = std::min(rows(b), (task + 1) * step(b));
                for (int row = task * step(b); row < last; row++) go(b, row);
            }};
}

// Calls go(batch, row, columns) for what a task takes of rows like `like`, to be packed.
template <class Go>
Operation by_tiles(Part part, int (*rows)(const Batch&), const Rows* like, Go go) {
    return {part,
            [=](const Batch& b) { return blocks_of(rows(b), rows_per_task(rows(b))) * column_parts(rows(b)); },
            [=](Batch& b, int task, int) {
                const int n = rows(b), step = rows_per_task(n), parts = column_parts(n), part = task % parts;
                const int first = task / parts * step, steps = like->stride / K_STEP;
                const Columns columns{steps * part / parts * K_STEP, steps * (part + 1) / parts * K_STEP};
                if (columns.begin == columns.end) return;
                for (int row = first; row < std::min(n, first + step); row++) go(b, row, columns);
            }};
}

template <class Unit>
void add_attention(Program& p, const Kv* kv, int layer, const Rows* qkv, uint32_t* q, const float* frequencies,
                   float* turns, const Rows* out, float scale, const Packed* packed) {
    const AttentionShape s = p.attention;
    auto attention = std::make_shared<Attention<Unit>>(*kv, s);
    p.operations.push_back(by_rows(ATTENTION, all_rows, [=](Batch& b, int row) {
        float* x = qkv->row(row);
        float* cos = turns + size_t(row) * s.dim;
        float* sin = cos + s.dim / 2;
        if (layer == 0)
            for (int i = 0; i < s.dim / 2; i++) {
                float angle = float(b.position[row]) * frequencies[i];
                cos[i] = std::cos(angle), sin[i] = std::sin(angle);
            }
        for (int head = 0; head < s.heads + s.kv_heads; head++) rotate(x + head * s.dim, cos, sin, s.dim);
        const int units = s.dim / Unit::PER_UNIT;
        for (int head = 0; head < s.heads; head++) {
            float* from = x + head * s.dim;
            for (int d = 0; d < s.dim; d++) from[d] *= scale;
            uint32_t* to = q + (size_t(row) * s.heads + head) * units;
            for (int d = 0; d < s.dim; d++)
                reinterpret_cast<typename Unit::Value*>(to)[d] = Unit::of(from[d]);
        }
        const Piece& piece = b.pieces[b.row_piece[row]];
        const int position = b.position[row], block = piece.table[position / BLOCK];
        const bool last = row == piece.first_row + piece.count - 1;
        const float* k = x + s.heads * s.dim;
        for (int head = 0; head < s.kv_heads; head++)
            kv->write<Unit>(block, position % BLOCK, layer, head, k + head * s.dim, k + (s.kv_heads + head) * s.dim, last);
    }));
    p.operations.push_back({ATTENTION, [](const Batch& b) { return int(b.tasks.size()); },
                            [=, &p](Batch& b, int task, int thread) {
                                const AttentionTask& t = b.tasks[task];
                                attention->run(p.memory[thread], t, b.pieces[t.piece], layer, q, b.partials.data(), *out);
                            }});
    p.operations.push_back({ATTENTION, [](const Batch& b) { return int(b.split.size()); },
                            [=](Batch& b, int task, int) {
                                attention->finish(b.pieces[b.split[task]], b.partials.data(), *out);
                            }});
    p.operations.push_back(by_tiles(ATTENTION, all_rows, out, [=](Batch&, int row, Columns columns) {
        pack_row(out->row(row), columns, row, *packed, out->width);
    }));
}

// The likeliest token of a row of logits, the first among equals, and whether all that decides it are numbers.
inline void choose(const float* logits, int vocabulary, int32_t* token, uint8_t* usable) {
    vf most = broadcast(-INFINITY), unusable{};
    vi where{};
    int i = 0;
    for (; i + LANES <= vocabulary; i += LANES) {
        vf v = load(logits + i);
        unusable += v - v;
        vi better = v > most;
        most = better ? v : most;
        where = better ? broadcast(i) : where;
    }
    float best = -INFINITY, peaks[LANES];
    int at = 0, places[LANES];
    store(peaks, most);
    memcpy(places, &where, sizeof places);
    bool fine = sum_lanes(unusable) == 0;
    for (int lane = 0; lane < LANES; lane++) {
        int index = places[lane] + lane;
        if (peaks[lane] > best || (peaks[lane] == best && index < at)) best = peaks[lane], at = index;
    }
    for (; i < vocabulary; i++) {
        fine = fine && std::isfinite(logits[i]);
        if (logits[i] > best) best = logits[i], at = i;
    }
    *token = at;
    *usable = fine;
}

}  // namespace shoal

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

API Kv* shoal_kv_new(int blocks, int layers, int heads, int dim, int bf16) {
    return new Kv(blocks, layers, heads, dim, bf16 != 0);
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
    p->attention = {heads, kv->heads, kv->dim, kv->padded_dim};
    auto* units = q->data.as<uint32_t>();
    auto* angles = turns->data.as<float>();
    if (kv->value_bytes == 2)
        add_attention<Bf16>(*p, kv, layer, qkv, units, frequencies, angles, out, scale, packed);
    else
        add_attention<Fp32>(*p, kv, layer, qkv, units, frequencies, angles, out, scale, packed);
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
