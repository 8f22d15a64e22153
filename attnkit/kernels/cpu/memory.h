// Working memory: buffers that grow and are used again by the next task of a thread.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <new>

namespace attnkit {

// An array of T at a multiple of 64 bytes with a vector to spare at its end.
template <class T>
class Buffer {
 public:
  Buffer() = default;
  explicit Buffer(int64_t size) { reserve(size); }
  Buffer(const Buffer &) = delete;
  Buffer &operator=(const Buffer &) = delete;
  ~Buffer() { release(); }

  T *data() const { return data_; }

  // Room for `size` elements of any contents; std::bad_alloc where there is none.
  T *reserve(int64_t size) {
    if (size <= size_) return data_;
    release();
    const uint64_t bytes = (static_cast<uint64_t>(size) * sizeof(T) + 127) / 64 * 64;
#if defined(_WIN32)
    data_ = static_cast<T *>(_aligned_malloc(bytes, 64));
#else
    data_ = static_cast<T *>(std::aligned_alloc(64, bytes));
#endif
    if (data_ == nullptr) throw std::bad_alloc();
    size_ = size;
    return data_;
  }

 private:
  void release() {
#if defined(_WIN32)
    _aligned_free(data_);
#else
    std::free(data_);
#endif
    data_ = nullptr;
    size_ = 0;
  }

  T *data_ = nullptr;
  int64_t size_ = 0;
};

}  // namespace attnkit
