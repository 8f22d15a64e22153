// Working memory: buffers that grow and are used again by the next task of a thread. Compiled with ATTNKIT_POISON, they
// hold NaN whenever they are asked for, so that nothing that was not written can go unnoticed.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <cstring>
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
    retain(size);
#if defined(ATTNKIT_POISON)
    if (data_ != nullptr) std::memset(data_, 0xff, bytes(size));
#endif
    return data_;
  }

  // The same, with what was written since the buffer has that size.
  T *retain(int64_t size) {
    if (size > size_) grow(size);
    return data_;
  }

 private:
  static uint64_t bytes(int64_t size) { return (static_cast<uint64_t>(size) * sizeof(T) + 127) / 64 * 64; }

  void grow(int64_t size) {
    release();
#if defined(_WIN32)
    data_ = static_cast<T *>(_aligned_malloc(bytes(size), 64));
#else
    data_ = static_cast<T *>(std::aligned_alloc(64, bytes(size)));
#endif
    if (data_ == nullptr) throw std::bad_alloc();
    size_ = size;
  }

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
