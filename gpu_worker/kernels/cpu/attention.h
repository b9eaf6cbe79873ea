// Causal attention over paged KV, one pass, no gathering: online softmax over segments of keys.
//
// A row's keys are cut into segments at fixed positions. Within one, scores, their maximum and the weighted sum of V are
// computed; segments are merged in order (Milakov and Gimelshein 2018, as flash attention does). What a row gets depends
// on its own query and keys only: the kernels for one row and for many add in the same order, keys beyond a row's own
// position have weight zero. So a prompt computed whole, in pieces or token by token gives the same bits.
//
// Query heads that share a KV head are rows of one tile. A piece of few tiles over more than one segment, as a decode or a
// small piece of a prompt, has its segments spread over all threads, and merged by a later operation in the same order.
#pragma once
#include <vector>

#include "kv_formats.h"

namespace shoal {

constexpr int SEGMENT = 512;   // keys
constexpr int TILE_ROWS = 96;  // query rows of a task
constexpr float LOG2_E = 1.44269504f;  // peaks are in powers of two

// One sequence's part of a step: rows [first_row, first_row + count) at positions [start, start + count).
struct Piece {
    int first_row, count, start;
    const int32_t* table;  // its blocks
    bool samples;
    bool split = false;  // a task has one of its segments only
    int partial = 0;     // a split piece's place among the partial results, in rows and their segments
    int segments() const { return (start + count + SEGMENT - 1) / SEGMENT; }
};

struct AttentionTask {
    int piece, kv_head, kv_heads;
    int first_head, heads;  // query heads [first_head, first_head + heads) of each KV head's group
    int first_query, queries;
    int first_segment, last_segment;
    bool brings;  // the one task of its piece that fetches this KV
    int head_rows() const { return queries * heads; }
};

struct AttentionShape {
    int heads, kv_heads, dim, padded_dim, value_bytes;
    int group() const { return heads / kv_heads; }
};

// A thread's working memory.
struct TileMemory {
    alignas(64) uint32_t q[TILE_ROWS][MAX_DIM];
    alignas(64) float scores[TILE_ROWS][SEGMENT];
    alignas(64) uint32_t weights[TILE_ROWS][SEGMENT];
    alignas(64) float sums[TILE_ROWS][MAX_DIM];    // of one segment
    alignas(64) float result[TILE_ROWS][MAX_DIM];  // of all so far
    float peak[TILE_ROWS], total[TILE_ROWS];
    float weight_scale[TILE_ROWS];
    float result_peak[TILE_ROWS], result_total[TILE_ROWS];
    int position[TILE_ROWS];
};

// result = result and segment together; the first segment of a row replaces what was there.
inline void merge(float* result, float& result_peak, float& result_total, const float* sums, float peak, float total,
                  int padded_dim, bool first) {
    if (first) {
        memcpy(result, sums, padded_dim * sizeof(float));
        result_peak = peak, result_total = total;
        return;
    }
    float most = peak > result_peak ? peak : result_peak;
    float old = power_of_two(result_peak - most), fresh = power_of_two(peak - most);
    for (int d = 0; d < padded_dim; d += LANES)
        store(result + d, fma(load(result + d), broadcast(old), load(sums + d) * fresh));
    result_total = result_total * old + total * fresh;
    result_peak = most;
}

template <class Form>
class Attention {
  public:
    Attention(const Kv& kv, AttentionShape shape) : kv_(kv), shape_(shape) {}

    // Scores of R rows against N neighbouring blocks of 16 keys.
    template <int R, int N>
    void score(TileMemory& m, int row, const uint8_t* const* blocks, int key) const {
        constexpr int PARTS = BLOCK / LANES;  // registers of a block's keys
        const int units = shape_.dim / Form::PER_UNIT;
        typename Form::Sum acc[R][N * PARTS];
        SHOAL_UNROLL
        for (int r = 0; r < R; r++)
            SHOAL_UNROLL
            for (int n = 0; n < N * PARTS; n++) acc[r][n] = Form::first_score(m.q[row + r] + units);
        const uint32_t* q = m.q[row];
        for (int u = 0; u < units; u++, q++) {
            vu k[N * PARTS];
            SHOAL_UNROLL
            for (int n = 0; n < N * PARTS; n++)
                k[n] = load_units(blocks[n / PARTS] + u * BLOCK * 4 + n % PARTS * sizeof(vu));
            SHOAL_UNROLL
            for (int r = 0; r < R; r++)
                SHOAL_UNROLL
                for (int n = 0; n < N * PARTS; n++) acc[r][n] = Form::meet(acc[r][n], k[n], q[r * MAX_DIM]);
        }
        SHOAL_UNROLL
        for (int n = 0; n < N * PARTS; n++) {
            const float* scales = scales_of(blocks[n / PARTS]) + n % PARTS * LANES;
            SHOAL_UNROLL
            for (int r = 0; r < R; r++)
                store(&m.scores[row + r][key + n * LANES], Form::score(acc[r][n], m.q[row + r] + units, scales));
        }
    }

    template <int R>
    void score_rows(TileMemory& m, int row, const uint8_t* const* blocks, int count) const {
        constexpr int N = beside(R) * LANES / BLOCK;
        int n = 0;
        for (; n + N <= count; n += N) score<R, N>(m, row, blocks + n, n * BLOCK);
        for (; n < count; n++) score<R, 1>(m, row, blocks + n, n * BLOCK);
    }

    // Weighted sums of V for R rows and C registers of dimensions.
    template <int R, int C>
    void weigh(TileMemory& m, int row, const uint8_t* const* blocks, int keys, int d) const {
        constexpr int P = Form::PER_UNIT, WORDS = Form::WORDS;
        typename Form::Sum acc[R][C] = {};
        const size_t stride = size_t(shape_.dim) * 4;
        const int units = (keys + P - 1) / P;
        for (int first = 0; first < units; first += BLOCK / P) {
            const uint8_t* v = blocks[first / (BLOCK / P)] + size_t(d) * 4;
            const uint32_t* w = m.weights[row] + first * WORDS;
            const uint32_t* last = w + std::min(units - first, BLOCK / P) * WORDS;
            for (; w < last; w += WORDS, v += stride) {
                vu part[C];
                SHOAL_UNROLL
                for (int c = 0; c < C; c++) part[c] = load_units(v + c * sizeof(vu));
                SHOAL_UNROLL
                for (int word = 0; word < WORDS; word++)
                    SHOAL_UNROLL
                    for (int c = 0; c < C; c++) {
                        const vu values = Form::values(part[c], word);
                        SHOAL_UNROLL
                        for (int r = 0; r < R; r++) acc[r][c] = Form::weigh(acc[r][c], values, w[r * SEGMENT + word]);
                    }
            }
        }
        SHOAL_UNROLL
        for (int r = 0; r < R; r++)
            SHOAL_UNROLL
            for (int c = 0; c < C; c++)
                store(&m.sums[row + r][d + c * LANES], Form::weighed(acc[r][c], m.weight_scale[row + r]));
    }

    template <int R>
    void weigh_rows(TileMemory& m, int row, const uint8_t* const* blocks, int keys) const {
        constexpr int C = beside(R);
        int d = 0;
        for (; d + C * LANES <= shape_.padded_dim; d += C * LANES) weigh<R, C>(m, row, blocks, keys, d);
        for (; d < shape_.padded_dim; d += LANES) weigh<R, 1>(m, row, blocks, keys, d);
    }

    // Scores become weights e^(score - peak), zero from the row's `seen` keys on; `vs` are the segment's blocks of V.
    void soften(TileMemory& m, int row, int seen, int keys, const uint8_t* const* vs) const {
        const float* scores = m.scores[row];
        const int whole = seen / LANES * LANES;
        const auto scales = [&](int k) { return load(scales_of(vs[k / BLOCK]) + k % BLOCK); };
        vf most = broadcast(-INFINITY), largest{}, total{}, unusable{};
        for (int k = 0; k < whole; k += LANES) {
            most = larger(most, load(scores + k));
            if constexpr (Form::SCALED) largest = larger(scales(k), largest);
        }
        if (whole < seen) {
            const vi inside = lane_numbers() + whole < seen;
            most = inside ? larger(most, load(scores + whole)) : most;
            if constexpr (Form::SCALED) largest = inside ? larger(scales(whole), largest) : largest;
        }
        const float peak = max_lanes(most) * LOG2_E;
        const typename Form::Weights weights(m.weights[row], max_lanes(largest));
        const auto put = [&](int k, vf w, vf scale) {
            total += w;
            unusable += weights.put(k, w, scale);
        };
        const auto weight = [&](int k) {
            return power_of_two(fma(load(scores + k), broadcast(LOG2_E), broadcast(-peak)));
        };
        int k = 0;
        for (; k < whole; k += LANES) put(k, weight(k), Form::SCALED ? scales(k) : vf{});
        if (whole < seen) {  // what is not seen may be anything
            const vi inside = lane_numbers() + whole < seen;
            put(k, inside ? weight(k) : vf{}, Form::SCALED ? inside ? scales(k) : vf{} : vf{});
            k += LANES;
        }
        for (; k < keys; k += LANES) put(k, vf{}, vf{});
        const float sum = sum_lanes(unusable);
        m.peak[row] = peak;
        m.total[row] = sum_lanes(total);
        m.weight_scale[row] = weights.scale + (sum - sum);
    }

    // Reads a task's part of blocks into the core's cache, several blocks side by side: a kernel alone, block after block,
    // waits for the memory half of its time, and prefetch instructions help less.
    void bring(const AttentionTask& task, const int32_t* table, int count, int layer) const {
        constexpr int BESIDE = 4;
        const size_t bytes = task.kv_heads * kv_.head_bytes;
        vu all{};
        for (int n = 0; n < count; n += BESIDE) {
            const uint8_t *ks[BESIDE], *vs[BESIDE];
            for (int i = 0; i < BESIDE; i++) {
                const int block = table[std::min(n + i, count - 1)];
                ks[i] = kv_.k(block, layer, task.kv_head), vs[i] = kv_.v(block, layer, task.kv_head);
            }
            for (size_t line = 0; line < bytes; line += 64)
                for (int i = 0; i < BESIDE; i++) all |= load_units(ks[i] + line) | load_units(vs[i] + line);
        }
        asm volatile("" ::"x"(all));
    }

    // One segment for all rows of the tile: m.peak, m.total, m.sums.
    void segment(TileMemory& m, const AttentionTask& task, const Piece& piece, int layer, int number) const {
        const int first = number * SEGMENT, rows = task.head_rows();
        int keys = 0;
        for (int r = 0; r < rows; r++) keys = std::max(keys, std::min(SEGMENT, m.position[r] + 1 - first));
        if (keys <= 0) return;
        const int count = (keys + BLOCK - 1) / BLOCK;
        const int32_t* table = piece.table + first / BLOCK;
        if (task.brings) bring(task, table, count, layer);
        for (int h = 0; h < task.kv_heads; h++) {
            const uint8_t *ks[SEGMENT / BLOCK], *vs[SEGMENT / BLOCK];
            for (int n = 0; n < count; n++)
                ks[n] = kv_.k(table[n], layer, task.kv_head + h), vs[n] = kv_.v(table[n], layer, task.kv_head + h);
            const int from = h * rows;
            for_rows<STRIP_ROWS>(rows, [&](auto R, int row) { score_rows<decltype(R)::value>(m, from + row, ks, count); });
            for (int r = from; r < from + rows; r++)
                soften(m, r, std::max(0, std::min(SEGMENT, m.position[r] + 1 - first)), keys, vs);
            for_rows<STRIP_ROWS>(rows, [&](auto R, int row) { weigh_rows<decltype(R)::value>(m, from + row, vs, keys); });
        }
    }

    // Queries q, packed [row][head][word], of the task's tile.
    void load_queries(TileMemory& m, const AttentionTask& task, const Piece& piece, const uint32_t* q) const {
        const int words = Form::query_words(shape_.dim);
        for (int r = 0; r < task.kv_heads * task.head_rows(); r++) {
            const int query = query_of(task, r);
            const uint32_t* from = q + (size_t(piece.first_row + query) * shape_.heads + head_of(task, r)) * words;
            memcpy(m.q[r], from, words * sizeof(uint32_t));
            m.position[r] = piece.start + query;
        }
    }

    static size_t partial_floats(const AttentionShape& s) { return size_t(s.padded_dim) + 2; }

    void run(TileMemory& m, const AttentionTask& task, const Piece& piece, int layer, const uint32_t* q,
             float* partials, const Rows& out) const {
        load_queries(m, task, piece, q);
        const int rows = task.kv_heads * task.head_rows();
        for (int s = task.first_segment; s < task.last_segment; s++) {
            segment(m, task, piece, layer, s);
            for (int r = 0; r < rows; r++) {
                if (m.position[r] < s * SEGMENT) continue;
                if (piece.split) {
                    float* to = partial(partials, piece, query_of(task, r), s, head_of(task, r));
                    memcpy(to, m.sums[r], shape_.padded_dim * sizeof(float));
                    to[shape_.padded_dim] = m.peak[r], to[shape_.padded_dim + 1] = m.total[r];
                } else {
                    merge(m.result[r], m.result_peak[r], m.result_total[r], m.sums[r], m.peak[r], m.total[r],
                          shape_.padded_dim, s == 0);
                }
            }
        }
        if (piece.split) return;
        for (int r = 0; r < rows; r++)
            write(out.row(piece.first_row + query_of(task, r)) + head_of(task, r) * shape_.dim, m.result[r],
                  m.result_total[r]);
    }

    // Merges the segments of one query of a split piece into its row of `out`.
    void finish(const Piece& piece, int query, float* partials, const Rows& out) const {
        alignas(64) float result[MAX_DIM];
        const int segments = (piece.start + query) / SEGMENT + 1;
        for (int head = 0; head < shape_.heads; head++) {
            float peak = 0, total = 0;
            for (int s = 0; s < segments; s++) {
                const float* from = partial(partials, piece, query, s, head);
                merge(result, peak, total, from, from[shape_.padded_dim], from[shape_.padded_dim + 1],
                      shape_.padded_dim, s == 0);
            }
            write(out.row(piece.first_row + query) + head * shape_.dim, result, total);
        }
    }

  private:
#ifdef __AVX512F__
    static constexpr int STRIP_ROWS = 12, WIDE_ROWS = 6;
#else
    static constexpr int STRIP_ROWS = 4, WIDE_ROWS = 2;
#endif

    // Registers of keys or dimensions that meet a strip: its sums fit into registers, and are enough not to wait for one
    // another.
    static constexpr int beside(int rows) { return rows > WIDE_ROWS ? 2 : 4; }

    // Rows in strips of MOST, then strips of 3, 2 and 1 (3: a common size of a group).
    template <int MOST, class Do>
    static void for_rows(int rows, const Do& go) {
        int row = 0;
        for (; row + MOST <= rows; row += MOST) go(std::integral_constant<int, MOST>(), row);
        for (; row + 3 <= rows; row += 3) go(std::integral_constant<int, 3>(), row);
        for (; row + 2 <= rows; row += 2) go(std::integral_constant<int, 2>(), row);
        for (; row < rows; row++) go(std::integral_constant<int, 1>(), row);
    }

    // A tile's rows are ordered by KV head, query, and query head.
    int head_of(const AttentionTask& task, int row) const {
        return (task.kv_head + row / task.head_rows()) * shape_.group() + task.first_head + row % task.heads;
    }
    int query_of(const AttentionTask& task, int row) const {
        return task.first_query + row % task.head_rows() / task.heads;
    }

    const float* scales_of(const uint8_t* head) const {
        return reinterpret_cast<const float*>(head + shape_.dim * BLOCK);
    }

    float* partial(float* partials, const Piece& piece, int query, int segment, int head) const {
        const size_t row = piece.partial + query * piece.segments() + segment;
        return partials + (row * shape_.heads + head) * partial_floats(shape_);
    }

    void write(float* to, const float* result, float total) const {
        for (int d = 0; d < shape_.dim; d++) to[d] = result[d] / total;
    }

    const Kv& kv_;
    const AttentionShape shape_;
};

}  // namespace shoal
