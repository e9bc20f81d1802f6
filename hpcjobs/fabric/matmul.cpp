// Matrix products over MPI, on GPUs or CPUs: what each rank computes, what the network carries, and a proof of both.
//
//   nvcc -x cu -ccbin mpicxx -Xcompiler -fopenmp -O3 -std=c++17 matmul.cpp -lcublas     (without -lcublas: -DNO_CUBLAS)
//   mpicxx -O3 -march=native -fopenmp -std=c++17 matmul.cpp
//
// Rank r fills A with 1+r and B with 0.5, both N x N, multiplies, and sums its C; rank 0 has the sum over ranks,
// which must be N^3 * 0.5 * sum(1+r). Random matrices hold integers, so that every sum is exact in every precision;
// all of C is compared with A and B after each run (see `check`). An iteration is product, copy to the host, and
// reduction; what is reported of each is its mean time. The kernels for GPUs are in kernels.cuh.

#include <mpi.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include <omp.h>

#if defined(OPEN_MPI) && __has_include(<mpi-ext.h>)
#include <mpi-ext.h>  // MPIX_Query_cuda_support; MPICH declares it in mpi.h
#endif

#ifdef __CUDACC__
#include <cuda_runtime.h>
#if !defined(NO_CUBLAS)
#include <cublas_v2.h>
#endif

#include "kernels.cuh"
#endif

enum Exit { OK = 0, WRONG = 1, USAGE = 2, OTHER_WORLD = 10 };

enum class Kernel { tiled, tensor, blas };
enum class Dtype { fp32, fp64, bf16 };
static const std::vector<std::string> KERNELS = {"tiled", "tensor", "blas"}, DTYPES = {"float", "double", "bf16"};

struct Options {
    int size = 256, iterations = 1;
    bool random = false;
    Kernel kernel = Kernel::tiled;
    Dtype dtype = Dtype::fp32;
    long sweep_bytes = 0;
    std::string json;
};

static int rank_ = 0, ranks_ = 1;

[[noreturn]] static void fail(int code, const std::string &message) {
    char host[256] = "";
    gethostname(host, sizeof host - 1);
    if (char *dot = std::strchr(host, '.')) *dot = '\0';
    std::fprintf(stderr, "matmul: rank %d on %s: %s\n", rank_, host, message.c_str());
    std::fflush(stderr);
    MPI_Abort(MPI_COMM_WORLD, code);
    std::exit(code);
}

// ---------------------------------------------------------------------------------------------------- options

static const char *const HELP =
    "matmul [OPTION]...: N x N matrix products on every rank of an MPI world\n"
    "  --size N              rows and columns [256]\n"
    "  --iterations K        products, each reduced over the ranks [1]\n"
    "  --matrices KIND       constant (A = 1+rank, B = 0.5) or random (integers from -16 to 16) [constant]\n"
    "  --dtype TYPE          float, double, or bf16 with sums in float [float; bf16 with --kernel tensor]\n"
    "  --kernel KIND         tiled (ours), tensor (ours, by tensor cores, bf16), or blas (cuBLAS, where it was built\n"
    "                        with it) [tiled]\n"
    "  --sweep BYTES         also time MPI_Allreduce from 1 KiB to this size; K and M are understood\n"
    "  --json FILE           also write the figures there; - prints them instead of the text\n";

static long count_of(const std::string &flag, const char *text) {
    char *end = nullptr;
    long value = std::strtol(text, &end, 10);
    if (*end == 'K') value <<= 10, ++end;
    else if (*end == 'M') value <<= 20, ++end;
    if (end == text || *end != '\0' || value < 1 || value > (1L << 31) - 1)
        fail(USAGE, flag + " " + text + ": not a positive number");
    return value;
}

static int choose(const std::string &flag, const std::string &value, const std::vector<std::string> &values) {
    std::string all;
    for (std::size_t i = 0; i < values.size(); ++i) {
        if (value == values[i]) return static_cast<int>(i);
        all += (i ? ", " : "") + values[i];
    }
    fail(USAGE, flag + " " + value + ": one of " + all);
}

static Options parse(int argc, char **argv) {
    Options options;
    bool says_dtype = false;
    for (int i = 1; i < argc; ++i) {
        const std::string flag = argv[i];
        if (flag == "--help") {
            if (rank_ == 0) std::fputs(HELP, stdout);
            MPI_Finalize();
            std::exit(OK);
        }
        if (i + 1 == argc) fail(USAGE, flag + ": unknown, or without its value; --help lists the options");
        const char *value = argv[++i];
        if (flag == "--size") options.size = static_cast<int>(std::min(count_of(flag, value), 1L << 16));
        else if (flag == "--iterations") options.iterations = static_cast<int>(count_of(flag, value));
        else if (flag == "--matrices") options.random = choose(flag, value, {"constant", "random"}) == 1;
        else if (flag == "--dtype") options.dtype = Dtype(choose(flag, value, DTYPES)), says_dtype = true;
        else if (flag == "--kernel") options.kernel = Kernel(choose(flag, value, KERNELS));
        else if (flag == "--sweep") options.sweep_bytes = count_of(flag, value);
        else if (flag == "--json") options.json = value;
        else fail(USAGE, flag + ": no such option; --help lists them");
    }
    if (options.kernel == Kernel::tensor && !says_dtype) options.dtype = Dtype::bf16;
    if ((options.kernel == Kernel::tensor) != (options.dtype == Dtype::bf16) && options.kernel != Kernel::blas)
        fail(USAGE, "--kernel tensor is for --dtype bf16, and tiled for float and double");
    return options;
}

// ---------------------------------------------------------------------------------------------------- the world

// A launcher that does not speak to this MPI starts N worlds of one, each of which would succeed.
static void refuse_worlds_of_one() {
    const char *asked = std::getenv("HPCJOBS_NTASKS");
    if (asked == nullptr && ranks_ == 1) asked = std::getenv("SLURM_STEP_NUM_TASKS");
    if (asked == nullptr || std::atoi(asked) == ranks_) return;
    const char *by = std::getenv("HPCJOBS_LAUNCHED_BY");
    char library[MPI_MAX_LIBRARY_VERSION_STRING];
    int length = 0;
    MPI_Get_library_version(library, &length);
    fail(OTHER_WORLD, std::string("MPI sees ") + std::to_string(ranks_) + " of " + asked + " ranks: " +
                          (by ? by : "the launcher") + " does not speak to " +
                          std::string(library).substr(0, std::string(library).find(',')) +
                          " (srun --mpi=pmix for Open MPI, pmi2 for MPICH; or mpirun)");
}

// ---------------------------------------------------------------------------------------------------- matrices

// Uniform in [0, 1), from its place alone: a mixing function of rank, matrix and index.
static inline double noise(std::uint64_t rank, std::uint64_t matrix, std::uint64_t index) {
    std::uint64_t x = index + 0x9e3779b97f4a7c15ULL * (2 * rank + matrix + 1);
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ULL;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebULL;
    return static_cast<double>((x ^ (x >> 31)) >> 11) * 0x1.0p-53;
}

// A of a rank, where it is constant. bf16 has 8 bits: it counts anew after 256 ranks.
static double left_of(const Options &options, int rank) {
    return 1.0 + (options.dtype == Dtype::bf16 ? rank % 256 : rank);
}

// An integer from -16 to 16: bf16 has 8 bits for it, and a sum of N products, at most 256 N, is exact in fp32 up to
// N = 65536, the largest size, in whatever order it is computed.
template <typename T>
static T entry(const Options &options, int matrix, std::size_t index) {
    if (options.random) return static_cast<T>(static_cast<int>(noise(rank_, matrix, index) * 33) - 16);
    return static_cast<T>(matrix == 0 ? left_of(options, rank_) : 0.5);
}

template <typename T>
static std::vector<T> fill(const Options &options, int matrix) {
    std::vector<T> values(static_cast<std::size_t>(options.size) * options.size);
#pragma omp parallel for schedule(static)
    for (std::size_t i = 0; i < values.size(); ++i) values[i] = entry<T>(options, matrix, i);
    return values;
}

// ---------------------------------------------------------------------------------------------------- products

#ifdef __CUDACC__

static void must(cudaError_t status, const char *what) {
    if (status != cudaSuccess) fail(WRONG, std::string(what) + ": " + cudaGetErrorString(status));
}

// On the device matrices have a whole number of tiles each way, filled up with zeros. `In` is what is multiplied.
template <typename In, typename T>
class Machine {
  public:
    Machine(const Options &options, const std::vector<T> &a, const std::vector<T> &b, int local_rank)
        : n_(options.size), padded_((n_ + TILE - 1) / TILE * TILE), kernel_(options.kernel) {
        int devices = 0;
        must(cudaGetDeviceCount(&devices), "no CUDA device");
        const int device = local_rank % devices;
        must(cudaSetDevice(device), "device");
        cudaDeviceProp properties;
        must(cudaGetDeviceProperties(&properties, device), "device properties");
        name = properties.name;
        char text[32] = "";
        must(cudaDeviceGetPCIBusId(text, sizeof text, device), "bus id");
        bus_id = text;
        if (options.dtype == Dtype::bf16 && properties.major < 8)
            fail(USAGE, name + " multiplies no bf16 (compute capability 8.0 and later does)");
        const std::size_t count = static_cast<std::size_t>(padded_) * padded_;
        for (In **matrix : {&a_, &b_}) must(cudaMalloc(matrix, count * sizeof(In)), "memory of the device");
        must(cudaMalloc(&c_, count * sizeof(T)), "memory of the device");
        send(a, a_);
        send(b, b_);
#ifdef NO_CUBLAS
        if (kernel_ == Kernel::blas) fail(USAGE, "--kernel blas: built without cuBLAS");
#else
        if (kernel_ == Kernel::blas && cublasCreate(&handle_) != CUBLAS_STATUS_SUCCESS)
            fail(WRONG, "cuBLAS does not start");
#endif
    }

    ~Machine() {
#ifndef NO_CUBLAS
        if (handle_ != nullptr) cublasDestroy(handle_);
#endif
        for (void *matrix : {static_cast<void *>(a_), static_cast<void *>(b_), static_cast<void *>(c_)})
            cudaFree(matrix);
    }

    Machine(const Machine &) = delete;
    Machine &operator=(const Machine &) = delete;

    void multiply() {
        if (kernel_ == Kernel::blas) multiply_by_blas();
        else if constexpr (sizeof(In) == 2) launch(tensor, Tensor::ROWS, Tensor::COLUMNS);
        else launch(tiled<T>, Tiled<T>::ROWS, Tiled<T>::COLUMNS);
        must(cudaDeviceSynchronize(), "product");
    }

    void fetch(std::vector<T> &c) {
        must(cudaMemcpy2D(c.data(), n_ * sizeof(T), c_, padded_ * sizeof(T), n_ * sizeof(T), n_, cudaMemcpyDeviceToHost),
             "copy");
    }

    std::string name, bus_id;

  private:
    static constexpr int TILE = 128;  // a multiple of every kernel's tile

    void send(const std::vector<T> &values, In *to) {
        std::vector<In> rows(static_cast<std::size_t>(padded_) * padded_, In(0.0f));
#pragma omp parallel for schedule(static)
        for (int i = 0; i < n_; ++i)
            for (int j = 0; j < n_; ++j)
                rows[static_cast<std::size_t>(i) * padded_ + j] = In(values[static_cast<std::size_t>(i) * n_ + j]);
        must(cudaMemcpy(to, rows.data(), rows.size() * sizeof(In), cudaMemcpyHostToDevice), "copy to the device");
    }

    void launch(void (*kernel)(const In *, const In *, T *, int), int rows, int columns) {
        void *arguments[] = {&a_, &b_, &c_, &padded_};
        must(cudaLaunchKernel(kernel, dim3(padded_ / columns, padded_ / rows), dim3(THREADS), arguments), "kernel");
    }

    // cuBLAS stores by columns: B^T A^T = (A B)^T, so the operands change places.
    void multiply_by_blas() {
#ifndef NO_CUBLAS
        const T one = 1, zero = 0;
        const int n = padded_;
        const cudaDataType_t in = sizeof(In) == 2 ? CUDA_R_16BF : sizeof(In) == 4 ? CUDA_R_32F : CUDA_R_64F;
        const cudaDataType_t out = sizeof(T) == 4 ? CUDA_R_32F : CUDA_R_64F;
        const cublasComputeType_t compute = sizeof(T) == 4 ? CUBLAS_COMPUTE_32F : CUBLAS_COMPUTE_64F;
        if (cublasGemmEx(handle_, CUBLAS_OP_N, CUBLAS_OP_N, n, n, n, &one, b_, in, n, a_, in, n, &zero, c_, out, n,
                         compute, CUBLAS_GEMM_DEFAULT) != CUBLAS_STATUS_SUCCESS)
            fail(WRONG, "cuBLAS failed");
#endif
    }

    int n_, padded_;
    Kernel kernel_;
    In *a_ = nullptr, *b_ = nullptr;
    T *c_ = nullptr;
#ifndef NO_CUBLAS
    cublasHandle_t handle_ = nullptr;
#endif
};

#else

// Blocks of A (MC x KC) and B (KC x NC) are packed into strips that lie in memory as the innermost loop reads them;
// it keeps MR x NR sums in registers. NR is two vectors of 256 bits.
template <typename In, typename T>
class Machine {
  public:
    Machine(const Options &options, const std::vector<T> &a, const std::vector<T> &b, int)
        : a_(a), b_(b), c_(a.size()), n_(options.size) {
        if (options.kernel != Kernel::tiled)
            fail(USAGE, "--kernel " + KERNELS[int(options.kernel)] + ": only where it was built with CUDA");
        name = std::to_string(omp_get_max_threads()) + " threads";
    }

    void multiply() {
        std::fill(c_.begin(), c_.end(), T(0));
        const int strips = (std::min(NC, n_) + NR - 1) / NR;
        std::vector<T> packed_b(static_cast<std::size_t>(strips) * NR * KC);
        for (int jc = 0; jc < n_; jc += NC)
            for (int pc = 0; pc < n_; pc += KC) {
                const int nc = std::min(NC, n_ - jc), kc = std::min(KC, n_ - pc);
#pragma omp parallel
                {
#pragma omp for schedule(static)
                    for (int j = 0; j < nc; j += NR) pack_b(&packed_b[static_cast<std::size_t>(j) * kc], pc, jc + j, kc);
                    std::vector<T> packed_a(static_cast<std::size_t>(MC) * KC);
#pragma omp for schedule(dynamic)
                    for (int ic = 0; ic < n_; ic += MC) block(packed_a, packed_b, ic, jc, pc, nc, kc);
                }
            }
    }

    void fetch(std::vector<T> &c) { std::copy(c_.begin(), c_.end(), c.begin()); }

    std::string name, bus_id;

  private:
    static constexpr int MR = 6, NR = 64 / sizeof(T), MC = 96, KC = 256, NC = 2048;

    void pack_b(T *to, int row, int column, int kc) const {
        const int width = std::min(NR, n_ - column);
        for (int p = 0; p < kc; ++p, to += NR)
            for (int j = 0; j < NR; ++j) to[j] = j < width ? b_[std::size_t(row + p) * n_ + column + j] : T(0);
    }

    void pack_a(T *to, int row, int column, int kc) const {
        const int height = std::min(MR, n_ - row);
        for (int p = 0; p < kc; ++p, to += MR)
            for (int i = 0; i < MR; ++i) to[i] = i < height ? a_[std::size_t(row + i) * n_ + column + p] : T(0);
    }

    void block(std::vector<T> &packed_a, const std::vector<T> &packed_b, int ic, int jc, int pc, int nc, int kc) {
        const int mc = std::min(MC, n_ - ic);
        for (int i = 0; i < mc; i += MR) pack_a(&packed_a[static_cast<std::size_t>(i) * kc], ic + i, pc, kc);
        for (int j = 0; j < nc; j += NR)
            for (int i = 0; i < mc; i += MR)
                strip(&packed_a[static_cast<std::size_t>(i) * kc], &packed_b[static_cast<std::size_t>(j) * kc], ic + i,
                      jc + j, kc);
    }

    void strip(const T *a, const T *b, int row, int column, int kc) {
        T sums[MR][NR] = {};
        for (int p = 0; p < kc; ++p, a += MR, b += NR)
            for (int i = 0; i < MR; ++i)
#pragma omp simd
                for (int j = 0; j < NR; ++j) sums[i][j] += a[i] * b[j];
        const int height = std::min(MR, n_ - row), width = std::min(NR, n_ - column);
        for (int i = 0; i < height; ++i)
            for (int j = 0; j < width; ++j) c_[std::size_t(row + i) * n_ + column + j] += sums[i][j];
    }

    const std::vector<T> &a_, &b_;
    std::vector<T> c_;
    int n_;
};

#endif

// ---------------------------------------------------------------------------------------------------- one rank's run

struct Figures {
    double gflops, compute_s, copy_s, reduce_s, sum;
    char host[MPI_MAX_PROCESSOR_NAME], device[256], bus_id[32];
};

// A matrix times a vector, in double precision.
template <typename T>
static std::vector<double> times(const std::vector<T> &matrix, const std::vector<double> &vector) {
    const std::size_t n = vector.size();
    std::vector<double> result(n);
#pragma omp parallel for schedule(static)
    for (std::size_t row = 0; row < n; ++row) {
        double sum = 0;
        for (std::size_t k = 0; k < n; ++k) sum += static_cast<double>(matrix[row * n + k]) * vector[k];
        result[row] = sum;
    }
    return result;
}

// All of C, by Freivalds: C x must be A (B x) for random x, here of integers below 2^13. With random matrices
// |B x| <= 16 * 2^16 * 2^13 = 2^33, |A (B x)| <= 16 * 2^16 * 2^33 = 2^53 and |C x| <= 2^24 * 2^16 * 2^13 = 2^53: all are
// integers that double precision holds exactly, and the tolerance is 0. A row with an error passes with a
// probability of 2^-13 at most, so two vectors let one of 67 million pass. Constant matrices sum exactly up to
// N (1 + rank) = 2^24; above that a sum of N products in fp32 errs by N roundings of 2^-24 at most.
template <typename T>
static void check(const Options &options, const std::vector<T> &a, const std::vector<T> &b, const std::vector<T> &c) {
    const double n = options.size;
    const bool exact = options.random || sizeof(T) == 8 || n * (1 + rank_) <= (1 << 24);
    for (int trial = 0; trial < 2; ++trial) {
        std::vector<double> x(options.size);
        for (std::size_t k = 0; k < x.size(); ++k) x[k] = std::floor(noise(rank_, 7 + trial, k) * 8192);
        const std::vector<double> expected = times(a, times(b, x)), computed = times(c, x);
        for (std::size_t row = 0; row < x.size(); ++row)
            if (!(std::fabs(computed[row] - expected[row]) <= (exact ? 0 : n * 0x1p-24 * expected[row])))
                fail(WRONG, "computes wrongly: row " + std::to_string(row) + " of C times a vector is " +
                                std::to_string(computed[row]) + ", not " + std::to_string(expected[row]));
    }
}

template <typename In, typename T>
static Figures run(const Options &options, int local_rank, double &total) {
    const std::vector<T> a = fill<T>(options, 0), b = fill<T>(options, 1);
    std::vector<T> c(a.size());
    Machine<In, T> machine(options, a, b, local_rank);
    machine.multiply();  // threads started, caches and clocks warm
    Figures mine = {};
    for (int k = 0; k < options.iterations; ++k) {
        MPI_Barrier(MPI_COMM_WORLD);
        const double begun = MPI_Wtime();
        machine.multiply();
        const double computed = MPI_Wtime();
        machine.fetch(c);
        const double copied = MPI_Wtime();
        mine.sum = 0;
        for (const T value : c) mine.sum += static_cast<double>(value);
        const double summed = MPI_Wtime();
        MPI_Reduce(&mine.sum, &total, 1, MPI_DOUBLE, MPI_SUM, 0, MPI_COMM_WORLD);
        mine.compute_s += computed - begun;
        mine.copy_s += copied - computed;
        mine.reduce_s += MPI_Wtime() - summed;
    }
    check(options, a, b, c);
    const double n = options.size;
    mine.compute_s /= options.iterations, mine.copy_s /= options.iterations, mine.reduce_s /= options.iterations;
    mine.gflops = 2 * n * n * n / mine.compute_s / 1e9;
    int length = 0;
    MPI_Get_processor_name(mine.host, &length);
    std::snprintf(mine.device, sizeof mine.device, "%s", machine.name.c_str());
    std::snprintf(mine.bus_id, sizeof mine.bus_id, "%s", machine.bus_id.c_str());
    return mine;
}

static Figures run_in(const Options &options, int local_rank, double &total) {
    if (options.dtype == Dtype::fp64) return run<double, double>(options, local_rank, total);
#ifdef __CUDACC__
    if (options.dtype == Dtype::bf16) return run<__nv_bfloat16, float>(options, local_rank, total);
#endif
    return run<float, float>(options, local_rank, total);
}

// N^3 * 0.5 * sum(1+r); each entry is rounded once per product, so the sum is as near as an entry is.
static void check_total(const Options &options, double total) {
    const double n = options.size;
    double expected = 0;
    for (int rank = 0; rank < ranks_; ++rank) expected += n * n * n * 0.5 * left_of(options, rank);
    const double allowed = (options.dtype == Dtype::fp64 ? 1.2e-16 : 6e-8) * (n + 8);
    if (!options.random && !(std::fabs(total - expected) <= allowed * expected))
        fail(WRONG, "the sum is " + std::to_string(total) + ", not " + std::to_string(expected));
}

// ---------------------------------------------------------------------------------------------------- the network

struct Point {
    long bytes;
    double seconds;
};

// Whether this MPI sends from the memory of GPUs.
static bool reads_device_memory() {
#if defined(__CUDACC__) && (defined(MPIX_CUDA_AWARE_SUPPORT) || (defined(MPICH_NUMVERSION) && MPICH_NUMVERSION >= 40000000))
    return MPIX_Query_cuda_support() == 1;
#else
    return false;
#endif
}

// What is summed over ranks: in the memory of the GPU where MPI reads it there, else in that of the host.
class SweepBuffer {
  public:
    explicit SweepBuffer(std::size_t count) : ones_(count, 1.0f), at_(ones_.data()) {
#ifdef __CUDACC__
        if (reads_device_memory()) must(cudaMalloc(&at_, count * sizeof(float)), "memory of the device");
#endif
    }

    ~SweepBuffer() {
#ifdef __CUDACC__
        if (at_ != ones_.data()) cudaFree(at_);
#endif
    }

    SweepBuffer(const SweepBuffer &) = delete;
    SweepBuffer &operator=(const SweepBuffer &) = delete;

    float *reset() {
        std::fill(ones_.begin(), ones_.end(), 1.0f);
#ifdef __CUDACC__
        if (at_ != ones_.data())
            must(cudaMemcpy(at_, ones_.data(), ones_.size() * sizeof(float), cudaMemcpyHostToDevice), "copy");
#endif
        return at_;
    }

    bool holds(float value) {
#ifdef __CUDACC__
        if (at_ != ones_.data())
            must(cudaMemcpy(ones_.data(), at_, ones_.size() * sizeof(float), cudaMemcpyDeviceToHost), "copy");
#endif
        return std::all_of(ones_.begin(), ones_.end(), [value](float one) { return one == value; });
    }

  private:
    std::vector<float> ones_;
    float *at_;
};

// The best of several rounds of MPI_Allreduce, each as slow as its slowest rank.
static std::vector<Point> sweep(long most) {
    std::vector<Point> points;
    for (long bytes = 1024; bytes <= most; bytes *= 4) {
        SweepBuffer buffer(bytes / sizeof(float));
        const int rounds = bytes <= (1 << 20) ? 20 : 5, count = static_cast<int>(bytes / sizeof(float));
        double best = 1e300;
        for (int round = 0; round <= rounds; ++round) {
            float *values = buffer.reset();
            MPI_Barrier(MPI_COMM_WORLD);
            const double begun = MPI_Wtime();
            MPI_Allreduce(MPI_IN_PLACE, values, count, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
            double took = MPI_Wtime() - begun;
            MPI_Allreduce(MPI_IN_PLACE, &took, 1, MPI_DOUBLE, MPI_MAX, MPI_COMM_WORLD);
            if (round > 0) best = std::min(best, took);
        }
        if (!buffer.holds(static_cast<float>(ranks_)))
            fail(WRONG, "MPI_Allreduce of " + std::to_string(bytes) + " bytes gave a wrong sum");
        points.push_back({bytes, best});
    }
    return points;
}

// ---------------------------------------------------------------------------------------------------- output

static std::string quoted(const char *text) {
    std::string out = "\"";
    for (; *text; ++text) {
        if (*text == '"' || *text == '\\') out += '\\';
        out += static_cast<unsigned char>(*text) < 32 ? ' ' : *text;
    }
    return out + '"';
}

static void write_json(FILE *file, const Options &o, double total, const std::vector<Figures> &all,
                       const std::vector<Point> &points) {
    std::fprintf(file, "{\"world_size\": %d, \"size\": %d, \"iterations\": %d, \"matrices\": \"%s\", \"dtype\": \"%s\", ",
                 ranks_, o.size, o.iterations, o.random ? "random" : "constant", DTYPES[int(o.dtype)].c_str());
    std::fprintf(file, "\"kernel\": \"%s\", \"total\": %.17g, \"allreduce_memory\": \"%s\", \"ranks\": [",
                 KERNELS[int(o.kernel)].c_str(), total, reads_device_memory() ? "device" : "host");
    for (int r = 0; r < ranks_; ++r)
        std::fprintf(file,
                     "%s\n  {\"rank\": %d, \"host\": %s, \"device\": %s, \"bus_id\": %s, \"gflops\": %.6g, \"compute_s\": %.6g, "
                     "\"copy_s\": %.6g, \"reduce_s\": %.6g}",
                     r ? "," : "", r, quoted(all[r].host).c_str(), quoted(all[r].device).c_str(),
                     all[r].bus_id[0] ? quoted(all[r].bus_id).c_str() : "null", all[r].gflops, all[r].compute_s,
                     all[r].copy_s, all[r].reduce_s);
    std::fprintf(file, "], \"allreduce\": [");
    for (std::size_t i = 0; i < points.size(); ++i)
        std::fprintf(file, "%s{\"bytes\": %ld, \"seconds\": %.6g}", i ? ", " : "", points[i].bytes, points[i].seconds);
    std::fprintf(file, "]}\n");
}

static void write_text(const Options &o, double total, const std::vector<Figures> &all,
                       const std::vector<Point> &points) {
    for (int r = 0; r < ranks_; ++r)
        std::printf("rank %d on %s (%s): %.2f GFLOP/s, compute %.6f s, copy %.6f s, reduce %.6f s\n", r, all[r].host,
                    all[r].device, all[r].gflops, all[r].compute_s, all[r].copy_s, all[r].reduce_s);
    for (const Point &point : points)
        std::printf("allreduce %10ld bytes: %10.1f us  %8.3f GB/s\n", point.bytes, point.seconds * 1e6,
                    static_cast<double>(point.bytes) / point.seconds / 1e9);
    std::printf("sum over %d ranks, N=%d: %.2f\n", ranks_, o.size, total);
}

int main(int argc, char **argv) {
    MPI_Init(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank_);
    MPI_Comm_size(MPI_COMM_WORLD, &ranks_);
    refuse_worlds_of_one();
    const Options options = parse(argc, argv);
    MPI_Comm node;
    MPI_Comm_split_type(MPI_COMM_WORLD, MPI_COMM_TYPE_SHARED, rank_, MPI_INFO_NULL, &node);
    int local_rank = 0;
    MPI_Comm_rank(node, &local_rank);
    double total = 0;
    const Figures mine = run_in(options, local_rank, total);
    const std::vector<Point> points = options.sweep_bytes ? sweep(options.sweep_bytes) : std::vector<Point>();
    std::vector<Figures> all(ranks_);
    MPI_Gather(&mine, sizeof mine, MPI_BYTE, all.data(), sizeof mine, MPI_BYTE, 0, MPI_COMM_WORLD);
    if (rank_ == 0) {
        check_total(options, total);
        if (options.json != "-") write_text(options, total, all, points);
        if (!options.json.empty()) {
            FILE *file = options.json == "-" ? stdout : std::fopen(options.json.c_str(), "w");
            if (file == nullptr) fail(USAGE, "--json " + options.json + ": cannot be written");
            write_json(file, options, total, all, points);
            if (file != stdout) std::fclose(file);
        }
    }
    MPI_Finalize();
    return OK;
}
