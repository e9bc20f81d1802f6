// As much of CUDA as hpcjobs/fabric/matmul.cpp uses, on a CPU: errors in its kernels' indices, missing barriers and
// wrong copies show without a GPU.
//
//   mpicxx -D__CUDACC__ -DNO_CUBLAS -I tests/data/emulated_cuda -fopenmp -std=c++17 -O2 hpcjobs/fabric/matmul.cpp
//
// A thread of a block is a context of its own that runs to its next barrier; blocks run one after the other. With
// EMULATION_BACKWARDS=1 the threads run in the other order. With -DGPU_AWARE_MPI MPI says that it reads the memory of GPUs.

#pragma once

#include <ucontext.h>

#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <vector>

#define __global__ static
#define __device__
#define __forceinline__ inline
#define __launch_bounds__(threads, blocks)
#define __shared__ static

struct dim3 {
    unsigned x, y, z;
    dim3(unsigned x, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};
static dim3 threadIdx(0), blockIdx(0);

// ------------------------------------------------------------------------------------------------ threads of a block

namespace emulation {
constexpr std::size_t MOST_THREADS = 256, STACK_BYTES = 1 << 17;
static ucontext_t scheduler, contexts[MOST_THREADS];
static bool ended[MOST_THREADS];
static std::function<void()> body;

[[noreturn]] static void fail(const char *message) {
    std::fprintf(stderr, "emulation: %s\n", message);
    std::_Exit(1);  // a thread's stack is no place for destructors
}

static void run_thread() {
    body();
    ended[threadIdx.x] = true;
}

static void run_block(int threads) {
    static std::vector<char> stacks(MOST_THREADS * STACK_BYTES);
    static const bool backwards = std::getenv("EMULATION_BACKWARDS") != nullptr;
    for (int i = 0; i < threads; ++i) {
        ended[i] = false;
        getcontext(&contexts[i]);
        contexts[i].uc_stack.ss_sp = &stacks[i * STACK_BYTES];
        contexts[i].uc_stack.ss_size = STACK_BYTES;
        contexts[i].uc_link = &scheduler;
        makecontext(&contexts[i], run_thread, 0);
    }
    for (int alive = threads; alive > 0;) {
        int waiting = 0;
        for (int i = 0; i < threads; ++i) {
            threadIdx.x = backwards ? threads - 1 - i : i;
            if (ended[threadIdx.x]) continue;
            swapcontext(&scheduler, &contexts[threadIdx.x]);
            waiting += !ended[threadIdx.x];
        }
        if (waiting != 0 && waiting != alive) fail("some threads wait at a barrier, and others have ended");
        alive = waiting;
    }
}
}  // namespace emulation

static inline void __syncthreads() {
    swapcontext(&emulation::contexts[threadIdx.x], &emulation::scheduler);
}

// ------------------------------------------------------------------------------------------------- CUDA's functions

#ifdef GPU_AWARE_MPI
extern "C" int MPIX_Query_cuda_support(void) { return 1; }
#endif

enum cudaError_t { cudaSuccess, cudaErrorMemoryAllocation };
enum cudaMemcpyKind { cudaMemcpyHostToDevice, cudaMemcpyDeviceToHost };
struct cudaDeviceProp {
    char name[256];
    int major;
};

static inline const char *cudaGetErrorString(cudaError_t) { return "emulated"; }
static inline cudaError_t cudaGetLastError() { return cudaSuccess; }
static inline cudaError_t cudaDeviceSynchronize() { return cudaSuccess; }
static inline cudaError_t cudaSetDevice(int) { return cudaSuccess; }

static inline cudaError_t cudaGetDeviceCount(int *count) {
    *count = 2;
    return cudaSuccess;
}

static inline cudaError_t cudaGetDeviceProperties(cudaDeviceProp *properties, int) {
    std::strcpy(properties->name, "emulated GPU");
    properties->major = 8;
    return cudaSuccess;
}

static inline cudaError_t cudaDeviceGetPCIBusId(char *text, int length, int device) {
    std::snprintf(text, length, "0000:%02X:00.0", 0x17 + device);
    return cudaSuccess;
}

// Filled with NaN, with a border behind it that nobody may write: cudaFree looks.
template <typename T>
cudaError_t cudaMalloc(T **at, std::size_t bytes) {
    constexpr std::size_t BORDER = 256;
    char *memory = static_cast<char *>(std::aligned_alloc(BORDER, (bytes + BORDER - 1) / BORDER * BORDER + 2 * BORDER));
    std::memcpy(memory, &bytes, sizeof bytes);
    std::memset(memory + BORDER, 0xff, bytes);
    std::memset(memory + BORDER + bytes, 0xa5, BORDER);
    *at = reinterpret_cast<T *>(memory + BORDER);
    return cudaSuccess;
}

static inline cudaError_t cudaFree(void *at) {
    if (at == nullptr) return cudaSuccess;
    char *memory = static_cast<char *>(at) - 256;
    std::size_t bytes;
    std::memcpy(&bytes, memory, sizeof bytes);
    for (int i = 0; i < 256; ++i)
        if (memory[256 + bytes + i] != static_cast<char>(0xa5)) emulation::fail("memory behind a matrix was written");
    std::free(memory);
    return cudaSuccess;
}

static inline cudaError_t cudaMemcpy(void *to, const void *from, std::size_t bytes, cudaMemcpyKind) {
    std::memcpy(to, from, bytes);
    return cudaSuccess;
}

static inline cudaError_t cudaMemcpy2D(void *to, std::size_t to_row, const void *from, std::size_t from_row,
                                       std::size_t bytes, std::size_t rows, cudaMemcpyKind) {
    for (std::size_t i = 0; i < rows; ++i)
        std::memcpy(static_cast<char *>(to) + i * to_row, static_cast<const char *>(from) + i * from_row, bytes);
    return cudaSuccess;
}

template <typename In, typename Out>
cudaError_t cudaLaunchKernel(void (*kernel)(const In *, const In *, Out *, int), dim3 grid, dim3 block, void **arguments) {
    emulation::body = [=] {
        kernel(*static_cast<const In **>(arguments[0]), *static_cast<const In **>(arguments[1]),
               *static_cast<Out **>(arguments[2]), *static_cast<int *>(arguments[3]));
    };
    for (blockIdx.y = 0; blockIdx.y < grid.y; ++blockIdx.y)
        for (blockIdx.x = 0; blockIdx.x < grid.x; ++blockIdx.x) emulation::run_block(block.x);
    return cudaSuccess;
}
