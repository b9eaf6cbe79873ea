// Causal attention over paged KV, one pass, no gathering: online softmax over segments of keys.
//
// A row's keys are cut into segments at fixed positions. Within one, scores, their maximum and the weighted sum of V are
// computed; segments are merged in order (Milakov and Gimelshein 2018, as flash attention does). What a row gets depends
// on its own query and keys only: the kernels for one row and for many add in the same order, keys beyond a row's own
// position have weight zero. So a prompt computed whole, in pieces or token by token gives the same bits.
//
// Query heads that share a KV head are rows of one tile. A long context of a decode is spread over all threads, and its
// segments are merged by a later operation, in the same order.
#pragma once
#include <vector>

#include "rows.h"

namespace shoal {

constexpr int SEGMENT = 128;   // keys
constexpr int TILE_ROWS = 48;  // query rows of a task
constexpr int SPLIT_SEGMENTS = 4;  // of a decode in one task
constexpr int MAX_DIM = 256;

// One sequence's part of a step: rows [first_row, first_row + count) at positions [start, start + count).
struct Piece {
    int first_row, count, start;
    const int32_t* table;  // its blocks
    bool samples;
    int partial;  // a split piece's place among the partial results, in segments
    int segments() const { return (start + count + SEGMENT - 1) / SEGMENT; }
    // A decode over a long context: its segments are spread over tasks, and merged when all are there.
    bool split() const { return count == 1 && segments() > SPLIT_SEGMENTS; }
};

struct AttentionTask {
    int piece, kv_head, first_head, heads;  // query heads [first_head, first_head + heads) of the KV head's group
    int first_query, queries;
    int first_segment, last_segment;
};

struct AttentionShape {
    int heads, kv_heads, dim, padded_dim;
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
    float old = exponential(result_peak - most), fresh = exponential(peak - most);
    for (int d = 0; d < padded_dim; d += LANES)
        store(result + d, fma(load(result + d), broadcast(old), load(sums + d) * fresh));
    result_total = result_total * old + total * fresh;
    result_peak = most;
}

template <class Unit>
class Attention {
  public:
    Attention(const Kv& kv, AttentionShape shape) : kv_(kv), shape_(shape) {}

    // Scores of R rows against N neighbouring blocks of 16 keys.
    template <int R, int N>
    void score(TileMemory& m, int row, const uint8_t* const* blocks, int key) const {
        constexpr int PARTS = BLOCK / LANES;  // registers of a block's keys
        vf acc[R][N * PARTS] = {};
        const uint32_t* q = m.q[row];
        for (int u = 0; u < shape_.dim / Unit::PER_UNIT; u++, q++) {
            vu k[N * PARTS];
            SHOAL_UNROLL
            for (int n = 0; n < N * PARTS; n++)
                k[n] = load_units(blocks[n / PARTS] + u * BLOCK * 4 + n % PARTS * sizeof(vu));
            SHOAL_UNROLL
            for (int r = 0; r < R; r++)
                SHOAL_UNROLL
                for (int n = 0; n < N * PARTS; n++) acc[r][n] = Unit::dot(acc[r][n], k[n], q[r * MAX_DIM]);
        }
        SHOAL_UNROLL
        for (int r = 0; r < R; r++)
            SHOAL_UNROLL
            for (int n = 0; n < N * PARTS; n++) store(&m.scores[row + r][key + n * LANES], acc[r][n]);
    }

    template <int R>
    void score_rows(TileMemory& m, int row, const uint8_t* const* blocks, int count) const {
        int n = 0;
#ifdef __AVX512F__
        for (; n + 2 <= count; n += 2) score<R, 2>(m, row, blocks + n, n * BLOCK);
#endif
        for (; n < count; n++) score<R, 1>(m, row, blocks + n, n * BLOCK);
    }

    // Weighted sums of V for R rows and C registers of dimensions.
    template <int R, int C>
    void weigh(TileMemory& m, int row, const uint8_t* const* blocks, int keys, int d) const {
        constexpr int P = Unit::PER_UNIT;
        vf acc[R][C] = {};
        const size_t stride = size_t(shape_.dim) * 4;
        const int units = (keys + P - 1) / P;
        for (int first = 0; first < units; first += BLOCK / P) {
            const uint8_t* v = blocks[first / (BLOCK / P)] + size_t(d) * 4;
            const uint32_t *w = m.weights[row] + first, *last = w + std::min(units - first, BLOCK / P);
            for (; w < last; w++, v += stride) {
                vu part[C];
                SHOAL_UNROLL
                for (int c = 0; c < C; c++) part[c] = load_units(v + c * sizeof(vu));
                SHOAL_UNROLL
                for (int r = 0; r < R; r++)
                    SHOAL_UNROLL
                    for (int c = 0; c < C; c++) acc[r][c] = Unit::dot(acc[r][c], part[c], w[r * SEGMENT]);
            }
        }
        SHOAL_UNROLL
        for (int r = 0; r < R; r++)
            SHOAL_UNROLL
            for (int c = 0; c < C; c++) store(&m.sums[row + r][d + c * LANES], acc[r][c]);
    }

    template <int R>
    void weigh_rows(TileMemory& m, int row, const uint8_t* const* blocks, int keys) const {
        int d = 0;
        for (; d + 4 * LANES <= shape_.padded_dim; d += 4 * LANES) weigh<R, 4>(m, row, blocks, keys, d);
        for (; d < shape_.padded_dim; d += LANES) weigh<R, 1>(m, row, blocks, keys, d);
    }

    // Scores become weights e^(score - peak), zero from the row's `seen` keys on.
    void soften(TileMemory& m, int row, int seen, int keys) const {
        constexpr int P = Unit::PER_UNIT;
        const float* scores = m.scores[row];
        vf most = broadcast(-INFINITY);
        for (int k = 0; k < seen; k += LANES) {
            vf s = load(scores + k);
            most = larger(most, lane_numbers() + k < seen ? s : broadcast(-INFINITY));
        }
        float peak = max_lanes(most);
        vf total{};
        for (int k = 0; k < rounded_up(keys, LANES); k += LANES) {
            vf w = k < seen ? exponential(load(scores + k) - peak) : vf{};
            if (k + LANES > seen) w = lane_numbers() + k < seen ? w : vf{};
            Unit::store_units(m.weights[row] + k / P, w);
            total += w;
        }
        m.peak[row] = peak;
        m.total[row] = sum_lanes(total);
    }

    // One segment for all rows of the tile: m.peak, m.total, m.sums.
    void segment(TileMemory& m, int rows, const Piece& piece, int layer, int kv_head, int number) const {
        const int first = number * SEGMENT;
        int keys = 0;
        for (int r = 0; r < rows; r++) keys = std::max(keys, std::min(SEGMENT, m.position[r] + 1 - first));
        if (keys <= 0) return;
        const int count = (keys + BLOCK - 1) / BLOCK;
        const uint8_t *ks[SEGMENT / BLOCK], *vs[SEGMENT / BLOCK];
        for (int n = 0; n < count; n++) {
            int block = piece.table[first / BLOCK + n];
            ks[n] = kv_.k(block, layer, kv_head), vs[n] = kv_.v(block, layer, kv_head);
        }
        for_rows<SCORE_ROWS>(rows, [&](auto R, int row) { score_rows<decltype(R)::value>(m, row, ks, count); });
        for (int r = 0; r < rows; r++) soften(m, r, std::max(0, std::min(SEGMENT, m.position[r] + 1 - first)), keys);
        for_rows<WEIGH_ROWS>(rows, [&](auto R, int row) { weigh_rows<decltype(R)::value>(m, row, vs, keys); });
    }

    // Queries q, packed [row][head][unit], of the task's tile.
    void load_queries(TileMemory& m, const AttentionTask& task, const Piece& piece, const uint32_t* q) const {
        const int units = shape_.dim / Unit::PER_UNIT;
        int r = 0;
        for (int i = 0; i < task.queries; i++)
            for (int h = 0; h < task.heads; h++, r++) {
                const int query = task.first_query + i;
                const int head = task.kv_head * shape_.group() + task.first_head + h;
                const uint32_t* from = q + (size_t(piece.first_row + query) * shape_.heads + head) * units;
                memcpy(m.q[r], from, units * sizeof(uint32_t));
                m.position[r] = piece.start + query;
            }
    }

    static size_t partial_floats(const AttentionShape& s) { return size_t(s.padded_dim) + 2; }

    void run(TileMemory& m, const AttentionTask& task, const Piece& piece, int layer, const uint32_t* q,
             float* partials, const Rows& out) const {
        load_queries(m, task, piece, q);
        const int rows = task.queries * task.heads;
        const bool split = piece.split();
        for (int s = task.first_segment; s < task.last_segment; s++) {
            segment(m, rows, piece, layer, task.kv_head, s);
            for (int r = 0; r < rows; r++) {
                if (split) {
                    float* to = partial(partials, piece, s, task.kv_head * shape_.group() + task.first_head + r);
                    memcpy(to, m.sums[r], shape_.padded_dim * sizeof(float));
                    to[shape_.padded_dim] = m.peak[r], to[shape_.padded_dim + 1] = m.total[r];
                } else if (m.position[r] >= s * SEGMENT) {
                    merge(m.result[r], m.result_peak[r], m.result_total[r], m.sums[r], m.peak[r], m.total[r],
                          shape_.padded_dim, s == 0);
                }
            }
        }
        if (split) return;
        for (int r = 0; r < rows; r++) {
            const int head = task.kv_head * shape_.group() + task.first_head + r % task.heads;
            write(out.row(piece.first_row + task.first_query + r / task.heads) + head * shape_.dim, m.result[r],
                  m.result_total[r]);
        }
    }

    // Merges a split piece's segments into its row of `out`.
    void finish(const Piece& piece, float* partials, const Rows& out) const {
        alignas(64) float result[MAX_DIM];
        for (int head = 0; head < shape_.heads; head++) {
            float peak = 0, total = 0;
            for (int s = 0; s < piece.segments(); s++) {
                const float* from = partial(partials, piece, s, head);
                merge(result, peak, total, from, from[shape_.padded_dim], from[shape_.padded_dim + 1],
                      shape_.padded_dim, s == 0);
            }
            write(out.row(piece.first_row) + head * shape_.dim, result, total);
        }
    }

  private:
#ifdef __AVX512F__
    static constexpr int SCORE_ROWS = 12, WEIGH_ROWS = 6;
#else
    static constexpr int SCORE_ROWS = 4, WEIGH_ROWS = 2;
#endif

    // Rows in strips of MOST, then strips of 3, 2 and 1 (3: a common size of a group).
    template <int MOST, class Do>
    static void for_rows(int rows, const Do& go) {
        int row = 0;
        for (; row + MOST <= rows; row += MOST) go(std::integral_constant<int, MOST>(), row);
        for (; row + 3 <= rows; row += 3) go(std::integral_constant<int, 3>(), row);
        for (; row + 2 <= rows; row += 2) go(std::integral_constant<int, 2>(), row);
        for (; row < rows; row++) go(std::integral_constant<int, 1>(), row);
    }

    float* partial(float* partials, const Piece& piece, int segment, int head) const {
        return partials + (size_t(piece.partial + segment) * shape_.heads + head) * partial_floats(shape_);
    }

    void write(float* to, const float* result, float total) const {
        for (int d = 0; d < shape_.dim; d++) to[d] = result[d] / total;
    }

    const Kv& kv_;
    const AttentionShape shape_;
};

}  // namespace shoal
