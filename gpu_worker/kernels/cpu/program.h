// A decoder as a list of operations over named rows, run by a team of threads in one call per step.
#pragma once
#include <chrono>

#include "attention.h"
#include "threads.h"

namespace shoal {

enum Part { ATTENTION = 0, FEED_FORWARD = 1, SAMPLING = 2, OTHER = 3, PARTS = 4 };

// What one call computes. Rows are packed: piece by piece.
struct Batch {
    int rows = 0;
    std::vector<Piece> pieces;
    std::vector<int> position, row_piece, logit_rows, split_rows;
    const int32_t* tokens = nullptr;
    std::vector<AttentionTask> tasks;
    std::vector<float> partials;
};

struct Operation {
    Part part;
    std::function<int(const Batch&)> tasks;
    std::function<void(Batch&, int task, int thread)> run;
};

// How many tasks a thread should find. A piece with fewer tiles than that for all threads is split, so that none waits for
// another's last one; where as many sequences decode, a task takes several KV heads of one.
constexpr int ENOUGH_TILES = 6;
constexpr int CACHE_BYTES = 512 << 10;  // of KV that a task reads at once
constexpr int PARTIAL_ROWS = 1 << 14;   // most partial results of a step, in rows: some tens of megabytes

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
        batch.tasks.clear(), batch.split_rows.clear();
        batch.tokens = tokens;
        batch.rows = 0;
        int partial_rows = 0;
        for (int i = 0; i < pieces; i++) {
            Piece p{batch.rows, counts[i], starts[i], tables + offsets[i], bool(samples[i])};
            const bool few = attention.heads && p.segments() > 1 && tiles(p) < ENOUGH_TILES * team.size();
            if (few && partial_rows + p.count * p.segments() <= PARTIAL_ROWS) {
                p.split = true, p.partial = partial_rows;
                partial_rows += p.count * p.segments();
                for (int t = 0; t < p.count; t++) batch.split_rows.push_back(batch.rows + t);
            }
            for (int t = 0; t < p.count; t++) batch.position.push_back(p.start + t), batch.row_piece.push_back(i);
            batch.rows += p.count;
            if (p.samples) batch.logit_rows.push_back(batch.rows - 1);
            batch.pieces.push_back(p);
        }
        if (!attention.heads) return;
        const bool crowd = std::count(counts, counts + pieces, 1) >= ENOUGH_TILES * team.size();
        const size_t floats = size_t(partial_rows) * attention.heads * (attention.padded_dim + 2);
        if (floats > batch.partials.size()) batch.partials.resize(floats);
        for (int i = 0; i < pieces; i++) plan_attention(i, crowd && counts[i] == 1 ? heads_beside() : 1);
    }

  private:
    // Query heads of a group, and queries, that are a tile.
    int tile_heads() const { return std::min(attention.group(), TILE_ROWS); }
    int tile_queries() const { return TILE_ROWS / tile_heads(); }
    int tiles(const Piece& p) const {
        const int parts = (attention.group() + tile_heads() - 1) / tile_heads();
        return (p.count + tile_queries() - 1) / tile_queries() * attention.kv_heads * parts;
    }

    // KV heads whose segment fits into a core's cache, and whose rows into a tile. Read together they touch each page of
    // memory once.
    int heads_beside() const {
        const int in_cache = CACHE_BYTES / (SEGMENT * 2 * attention.value_bytes * attention.dim);
        return std::max(1, std::min({attention.kv_heads, TILE_ROWS / attention.group(), in_cache}));
    }

    void plan_attention(int number, int kv_heads) {
        const Piece& p = batch.pieces[number];
        const int group = attention.group(), heads = tile_heads(), queries = tile_queries();
        const int step = p.split ? 1 : p.segments();
        const int heaviest = (p.count - 1) / queries * queries;
        for (int first = heaviest; first >= 0; first -= queries)
            for (int kv_head = 0; kv_head < attention.kv_heads; kv_head += kv_heads)
                for (int h = 0; h < group; h += heads) {
                    AttentionTask task{number, kv_head, std::min(kv_heads, attention.kv_heads - kv_head)};
                    task.first_head = h, task.heads = std::min(heads, group - h);
                    task.first_query = first, task.queries = std::min(queries, p.count - first);
                    task.brings = first == heaviest && h == 0;
                    const int segments = (p.start + first + task.queries + SEGMENT - 1) / SEGMENT;
                    for (int s = 0; s < segments; s += step) {
                        task.first_segment = s, task.last_segment = std::min(segments, s + step);
                        batch.tasks.push_back(task);
                    }
                }
    }
};

}  // namespace shoal
