// What operations do, and how each is cut into tasks.
#pragma once
#include "program.h"

namespace shoal {

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

template <class Form>
void add_attention(Program& p, const Kv* kv, int layer, const Rows* qkv, uint32_t* q, const float* frequencies,
                   float* turns, const Rows* out, float scale, const Packed* packed) {
    const AttentionShape s = p.attention;
    auto attention = std::make_shared<Attention<Form>>(*kv, s);
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
        for (int head = 0; head < s.heads; head++) {
            float* from = x + head * s.dim;
            for (int d = 0; d < s.dim; d++) from[d] *= scale;
            Form::pack_query(from, s.dim, q + (size_t(row) * s.heads + head) * Form::query_words(s.dim));
        }
        const Piece& piece = b.pieces[b.row_piece[row]];
        const int position = b.position[row], block = piece.table[position / BLOCK];
        const bool last = row == piece.first_row + piece.count - 1;
        const float *k = x + s.heads * s.dim, *v = k + s.kv_heads * s.dim;
        for (int head = 0; head < s.kv_heads; head++)
            Form::write(*kv, kv->k(block, layer, head), kv->v(block, layer, head), position % BLOCK, k + head * s.dim,
                        v + head * s.dim, last);
    }));
    p.operations.push_back({ATTENTION, [](const Batch& b) { return int(b.tasks.size()); },
                            [=, &p](Batch& b, int task, int thread) {
                                const AttentionTask& t = b.tasks[task];
                                attention->run(p.memory[thread], t, b.pieces[t.piece], layer, q, b.partials.data(), *out);
                            }});
    p.operations.push_back({ATTENTION, [](const Batch& b) { return int(b.split_rows.size()); },
                            [=](Batch& b, int task, int) {
                                const int row = b.split_rows[task];
                                const Piece& piece = b.pieces[b.row_piece[row]];
                                attention->finish(piece, row - piece.first_row, b.partials.data(), *out);
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
