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

}  // namespace shoal
