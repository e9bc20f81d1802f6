// Matrix products over MPI, on GPUs or CPUs: what each rank computes, what the network carries, and a proof of both.
//
//   nvcc -x cu -ccbin mpicxx -O3 -std=c++17 matmul.cpp -lcublas     (without -lcublas: -DNO_CUBLAS)
//   mpicxx -O3 -march=native -fopenmp -std=c++17 matmul.cpp
//
// Rank r fills A with 1+r and B with 0.5, both N x N, multiplies, and sums its C; rank 0 has the sum over ranks,
// which must be N^3 * 0.5 * sum(1+r). Random matrices are numbers that any rank can compute again from their place,
// so some entries of C are compared with a sum in double precision. An iteration is product, copy to the host, and
// reduction; what is told of each is its mean time.

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

#ifdef __CUDACC__
#include <cuda_runtime.h>
#if !defined(NO_CUBLAS)
#include <cublas_v2.h>
#endif
#else
#include <omp.h>
#endif

enum Exit { OK = 0, WRONG = 1, USAGE = 2, OTHER_WORLD = 10 };

struct Options {
    int size = 256, iterations = 1;
    bool random = false, in_double = false, blas = false;
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

// ---------------------------------------------------------------------------------------------------- words

static const char *const HELP =
    "matmul [OPTION]...: N x N matrix products on every rank of an MPI world\n"
    "  --size N              rows and columns [256]\n"
    "  --iterations K        products, each reduced over the ranks [1]\n"
    "  --matrices KIND       constant (A = 1+rank, B = 0.5) or random [constant]\n"
    "  --dtype TYPE          float or double [float]\n"
    "  --kernel KIND         tiled (ours) or blas (cuBLAS, where it was built with it) [tiled]\n"
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

static bool chosen(const std::string &flag, const std::string &word, const char *first, const char *second) {
    if (word != first && word != second) fail(USAGE, flag + " " + word + ": " + first + " or " + second);
    return word == second;
}

static Options parse(int argc, char **argv) {
    Options options;
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
        else if (flag == "--matrices") options.random = chosen(flag, value, "constant", "random");
        else if (flag == "--dtype") options.in_double = chosen(flag, value, "float", "double");
        else if (flag == "--kernel") options.blas = chosen(flag, value, "tiled", "blas");
        else if (flag == "--sweep") options.sweep_bytes = count_of(flag, value);
        else if (flag == "--json") options.json = value;
        else fail(USAGE, flag + ": no such option; --help lists them");
    }
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

template <typename T>
static T entry(const Options &options, int matrix, std::size_t index) {
    if (options.random) return static_cast<T>(noise(rank_, matrix, index));
    return static_cast<T>(matrix == 0 ? 1.0 + rank_ : 0.5);
}

template <typename T>
static std::vector<T> filled(const Options &options, int matrix) {
    std::vector<T> values(static_cast<std::size_t>(options.size) * options.size);
#ifndef __CUDACC__
#pragma omp parallel for schedule(static)
#endif
    for (std::size_t i = 0; i < values.size(); ++i) values[i] = entry<T>(options, matrix, i);
    return values;
}

// ---------------------------------------------------------------------------------------------------- products

#ifdef __CUDACC__

static void must(cudaError_t status, const char *what) {
    if (status != cudaSuccess) fail(WRONG, std::string(what) + ": " + cudaGetErrorString(status));
}

// Each block computes a TILE x TILE part of C from tiles of A and B that its threads load together; each thread
// keeps ROWS entries of one column in registers, so that a value of B read from shared memory is used ROWS times.
constexpr int TILE = 32, ROWS = 4;

template <typename T>
__global__ void product(const T *a, const T *b, T *c, int n) {
    __shared__ T tile_a[TILE][TILE + 1], tile_b[TILE][TILE + 1];
    const int column = blockIdx.x * TILE + threadIdx.x;
    T sums[ROWS] = {};
    for (int start = 0; start < n; start += TILE) {
        for (int k = 0; k < ROWS; ++k) {
            const int local = threadIdx.y + k * (TILE / ROWS), row = blockIdx.y * TILE + local;
            const int across = start + threadIdx.x, down = start + local;
            tile_a[local][threadIdx.x] = row < n && across < n ? a[static_cast<std::size_t>(row) * n + across] : T(0);
            tile_b[local][threadIdx.x] = down < n && column < n ? b[static_cast<std::size_t>(down) * n + column] : T(0);
        }
        __syncthreads();
        for (int i = 0; i < TILE; ++i) {
            const T right = tile_b[i][threadIdx.x];
            for (int k = 0; k < ROWS; ++k) sums[k] += tile_a[threadIdx.y + k * (TILE / ROWS)][i] * right;
        }
        __syncthreads();
    }
    for (int k = 0; k < ROWS; ++k) {
        const int row = blockIdx.y * TILE + threadIdx.y + k * (TILE / ROWS);
        if (row < n && column < n) c[static_cast<std::size_t>(row) * n + column] = sums[k];
    }
}

template <typename T>
class Machine {
  public:
    Machine(const Options &options, const std::vector<T> &a, const std::vector<T> &b, int local_rank)
        : n_(options.size), blas_(options.blas), bytes_(a.size() * sizeof(T)) {
        int devices = 0;
        must(cudaGetDeviceCount(&devices), "no CUDA device");
        must(cudaSetDevice(local_rank % devices), "device");
        cudaDeviceProp properties;
        must(cudaGetDeviceProperties(&properties, local_rank % devices), "device properties");
        name = properties.name;
        for (T **matrix : {&a_, &b_, &c_}) must(cudaMalloc(matrix, bytes_), "memory of the device");
        must(cudaMemcpy(a_, a.data(), bytes_, cudaMemcpyHostToDevice), "copy to the device");
        must(cudaMemcpy(b_, b.data(), bytes_, cudaMemcpyHostToDevice), "copy to the device");
#ifdef NO_CUBLAS
        if (blas_) fail(USAGE, "--kernel blas: built without cuBLAS");
#else
        if (blas_ && cublasCreate(&handle_) != CUBLAS_STATUS_SUCCESS) fail(WRONG, "cuBLAS does not start");
#endif
    }

    void multiply() {
        if (blas_) with_blas();
        else {
            const dim3 threads(TILE, TILE / ROWS), blocks((n_ + TILE - 1) / TILE, (n_ + TILE - 1) / TILE);
            product<T><<<blocks, threads>>>(a_, b_, c_, n_);
            must(cudaGetLastError(), "kernel");
        }
        must(cudaDeviceSynchronize(), "product");
    }

    void fetch(std::vector<T> &c) { must(cudaMemcpy(c.data(), c_, bytes_, cudaMemcpyDeviceToHost), "copy"); }

    std::string name;

  private:
    // cuBLAS stores by columns: B^T A^T = (A B)^T, so the operands change places.
    void with_blas() {
#ifndef NO_CUBLAS
        const T one = 1, zero = 0;
        cublasStatus_t status;
        if constexpr (sizeof(T) == 4)
            status = cublasSgemm(handle_, CUBLAS_OP_N, CUBLAS_OP_N, n_, n_, n_, &one, b_, n_, a_, n_, &zero, c_, n_);
        else
            status = cublasDgemm(handle_, CUBLAS_OP_N, CUBLAS_OP_N, n_, n_, n_, &one, b_, n_, a_, n_, &zero, c_, n_);
        if (status != CUBLAS_STATUS_SUCCESS) fail(WRONG, "cuBLAS failed");
#endif
    }

    int n_;
    bool blas_;
    std::size_t bytes_;
    T *a_ = nullptr, *b_ = nullptr, *c_ = nullptr;
#ifndef NO_CUBLAS
    cublasHandle_t handle_ = nullptr;
#endif
};

#else

// Blocks of A (MC x KC) and B (KC x NC) are packed into strips that lie in memory as the innermost loop reads them;
// it keeps MR x NR sums in registers. NR is two vectors of 256 bits.
template <typename T>
class Machine {
  public:
    Machine(const Options &options, const std::vector<T> &a, const std::vector<T> &b, int)
        : a_(a), b_(b), c_(a.size()), n_(options.size) {
        if (options.blas) fail(USAGE, "--kernel blas: only where it was built with CUDA");
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

    std::string name;

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
    char host[MPI_MAX_PROCESSOR_NAME], device[256];
};

// Entries of C against double precision. A sum of n products in T errs by n roundings at the very most.
template <typename T>
static void check(const Options &options, const std::vector<T> &c) {
    const std::size_t n = options.size;
    const double allowed = (sizeof(T) == 4 ? 6e-8 : 1.2e-16) * static_cast<double>(n + 8);
    for (std::uint64_t sample = 0; sample < 64; ++sample) {
        const std::size_t place = static_cast<std::size_t>(noise(rank_, 7, sample) * static_cast<double>(n * n));
        const std::size_t row = place / n, column = place % n;
        double exact = 0;
        for (std::size_t k = 0; k < n; ++k)
            exact += static_cast<double>(entry<T>(options, 0, row * n + k)) * entry<T>(options, 1, k * n + column);
        if (!(std::fabs(c[place] - exact) <= allowed * std::fabs(exact)))
            fail(WRONG, "computes wrongly: C(" + std::to_string(row) + "," + std::to_string(column) + ") is " +
                            std::to_string(c[place]) + ", not " + std::to_string(exact));
    }
}

template <typename T>
static Figures run(const Options &options, int local_rank, double &total) {
    const std::vector<T> a = filled<T>(options, 0), b = filled<T>(options, 1);
    std::vector<T> c(a.size());
    Machine<T> machine(options, a, b, local_rank);
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
    check(options, c);
    const double n = options.size;
    mine.compute_s /= options.iterations, mine.copy_s /= options.iterations, mine.reduce_s /= options.iterations;
    mine.gflops = 2 * n * n * n / mine.compute_s / 1e9;
    int length = 0;
    MPI_Get_processor_name(mine.host, &length);
    std::snprintf(mine.device, sizeof mine.device, "%s", machine.name.c_str());
    return mine;
}

// N^3 * 0.5 * sum(1+r); each entry is rounded once per product, so the sum is as near as an entry is.
static void check_total(const Options &options, double total) {
    const double n = options.size, ranks = ranks_;
    const double expected = n * n * n * 0.5 * (ranks * (ranks + 1) / 2);
    const double allowed = (options.in_double ? 1.2e-16 : 6e-8) * (n + 8);
    if (!options.random && !(std::fabs(total - expected) <= allowed * expected))
        fail(WRONG, "the sum is " + std::to_string(total) + ", not " + std::to_string(expected));
}

// ---------------------------------------------------------------------------------------------------- the network

struct Point {
    long bytes;
    double seconds;
};

// The best of several rounds of MPI_Allreduce, each as slow as its slowest rank.
static std::vector<Point> sweep(long most) {
    std::vector<Point> points;
    for (long bytes = 1024; bytes <= most; bytes *= 4) {
        std::vector<float> values(bytes / sizeof(float), 1.0f);
        const int rounds = bytes <= (1 << 20) ? 20 : 5;
        double best = 1e300;
        for (int round = 0; round <= rounds; ++round) {
            std::fill(values.begin(), values.end(), 1.0f);
            MPI_Barrier(MPI_COMM_WORLD);
            const double begun = MPI_Wtime();
            MPI_Allreduce(MPI_IN_PLACE, values.data(), static_cast<int>(values.size()), MPI_FLOAT, MPI_SUM,
                          MPI_COMM_WORLD);
            double took = MPI_Wtime() - begun;
            MPI_Allreduce(MPI_IN_PLACE, &took, 1, MPI_DOUBLE, MPI_MAX, MPI_COMM_WORLD);
            if (round > 0) best = std::min(best, took);
        }
        if (values.front() != static_cast<float>(ranks_) || values.back() != static_cast<float>(ranks_))
            fail(WRONG, "MPI_Allreduce of " + std::to_string(bytes) + " bytes gave a wrong sum");
        points.push_back({bytes, best});
    }
    return points;
}

// ---------------------------------------------------------------------------------------------------- what it says

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
                 ranks_, o.size, o.iterations, o.random ? "random" : "constant", o.in_double ? "double" : "float");
    std::fprintf(file, "\"kernel\": \"%s\", \"total\": %.17g, \"ranks\": [", o.blas ? "blas" : "tiled", total);
    for (int r = 0; r < ranks_; ++r)
        std::fprintf(file,
                     "%s\n  {\"rank\": %d, \"host\": %s, \"device\": %s, \"gflops\": %.6g, \"compute_s\": %.6g, "
                     "\"copy_s\": %.6g, \"reduce_s\": %.6g}",
                     r ? "," : "", r, quoted(all[r].host).c_str(), quoted(all[r].device).c_str(), all[r].gflops,
                     all[r].compute_s, all[r].copy_s, all[r].reduce_s);
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
    const Figures mine =
        options.in_double ? run<double>(options, local_rank, total) : run<float>(options, local_rank, total);
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
