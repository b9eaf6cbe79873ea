// Large, aligned, zeroed memory that the system backs with huge pages where it can.
#pragma once
#include <sys/mman.h>

#include <cstddef>
#include <new>

namespace shoal {

class Memory {
  public:
    explicit Memory(size_t bytes) : bytes_(bytes ? bytes : 1) {
        data_ = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (data_ == MAP_FAILED) throw std::bad_alloc();
        madvise(data_, bytes_, MADV_HUGEPAGE);
    }
    ~Memory() {
        if (data_) munmap(data_, bytes_);
    }
    Memory(Memory&& other) noexcept : data_(other.data_), bytes_(other.bytes_) { other.data_ = nullptr; }
    Memory(const Memory&) = delete;
    Memory& operator=(const Memory&) = delete;
    Memory& operator=(Memory&&) = delete;

    template <class T>
    T* as() const {
        return static_cast<T*>(data_);
    }

  private:
    void* data_;
    size_t bytes_;
};

}  // namespace shoal
