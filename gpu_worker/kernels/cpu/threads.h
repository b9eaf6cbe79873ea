// A team of threads that walks through a list of operations together, in step.
//
// Each operation is cut into tasks that whoever is free takes next, so a thread that the system holds up (other
// processes share the cores) delays the rest by one task at most. Between operations all wait for the last: spinning,
// for most waits are shorter than waking a thread takes, and letting others have the core for a moment now and then. A
// thread sleeps only between steps: a core that falls idle inside one is slow to come back, on a virtual machine most.
#pragma once
#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <climits>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

namespace shoal {

class Team {
  public:
    // The caller is one of `threads`; `spins` = looks at a flag before a thread yields or sleeps, some 10 ns each.
    explicit Team(int threads, int spins) : size_(threads < 1 ? 1 : threads), spins_(spins) {
        pthread_getaffinity_np(pthread_self(), sizeof allowed_, &allowed_);
        bound_ = allowed_;
        for (int i = 1; i < size_; i++) helpers_.emplace_back([this, i] { help(i); });
    }

    ~Team() {
        stopping_ = true;
        start();
        for (auto& one : helpers_) one.join();
    }

    int size() const { return size_; }

    // Runs body(thread) on every thread of the team; returns when all have returned.
    template <class Body>
    void together(const Body& body) {
        if (size_ == 1) return body(0);
        body_ = [&body](int thread) { body(thread); };
        start();
        body(0);
        wait_for_all();
    }

    // All of the team have come here. Called by every thread inside `together`.
    void wait_for_all() {
        if (size_ == 1) return;
        uint32_t round = round_.load(std::memory_order_relaxed);
        if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == size_) {
            arrived_.store(0, std::memory_order_relaxed);
            round_.fetch_add(1, std::memory_order_release);
        } else {
            while (!changed(round_, round)) sched_yield();
        }
    }

  private:
    void start() {
        keep_off(sched_getcpu());
        advance(started_, asleep_idle_);
    }

    // Binds the helpers to all allowed cores but the caller's: the system likes to wake a thread on the core of who wakes
    // it, where it would wait for the caller to pause. What somebody else has bound them to meanwhile is allowed then.
    void keep_off(int core) {
        if (core == caller_core_ || core < 0 || helpers_.empty()) return;
        cpu_set_t now;
        if (pthread_getaffinity_np(helpers_[0].native_handle(), sizeof now, &now)) return;
        if (!CPU_EQUAL(&now, &bound_)) allowed_ = now;
        bound_ = allowed_;
        CPU_CLR(core, &bound_);
        if (CPU_COUNT(&bound_) < size_ - 1) bound_ = allowed_;
        bool done = true;
        for (auto& one : helpers_) done &= !pthread_setaffinity_np(one.native_handle(), sizeof bound_, &bound_);
        if (done) caller_core_ = core;
    }

    void help(int thread) {
        uint32_t seen = 0;
        while (true) {
            wait_until_changed(started_, seen, asleep_idle_);
            seen++;
            if (stopping_) return;
            body_(thread);
            wait_for_all();
        }
    }

    static void advance(std::atomic<uint32_t>& word, std::atomic<int>& asleep) {
        word.fetch_add(1);
        if (asleep.load()) syscall(SYS_futex, &word, FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
    }

    // Whether it changes while one looks.
    bool changed(const std::atomic<uint32_t>& word, uint32_t seen) const {
        for (int i = 0; i < spins_; i++) {
            if (word.load(std::memory_order_acquire) != seen) return true;
            __builtin_ia32_pause();
        }
        return false;
    }

    void wait_until_changed(std::atomic<uint32_t>& word, uint32_t seen, std::atomic<int>& asleep) const {
        if (changed(word, seen)) return;
        asleep.fetch_add(1);
        while (word.load() == seen) syscall(SYS_futex, &word, FUTEX_WAIT_PRIVATE, seen, nullptr, nullptr, 0);
        asleep.fetch_sub(1);
    }

    const int size_;
    const int spins_;
    std::vector<std::thread> helpers_;
    cpu_set_t allowed_{}, bound_{};  // what the helpers may use, and what they do
    int caller_core_ = -1;
    std::function<void(int)> body_;
    std::atomic<bool> stopping_{false};
    alignas(64) std::atomic<uint32_t> started_{0};
    alignas(64) std::atomic<uint32_t> round_{0};
    alignas(64) std::atomic<int> arrived_{0};
    alignas(64) std::atomic<int> asleep_idle_{0};
};

}  // namespace shoal
