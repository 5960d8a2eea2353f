/* y = x W^T + b in float32, with W in 8 or 4 bits: a draft model is bound by reading W, so fewer bytes are less time.
 *
 * Each group of 32 weights of a row has a scale, and in 4 bits an offset: w = scale * code + offset, with codes of
 * -127..127 or 0..15. x is rounded to 16 bits, one scale a row. To 8 bits would cost as much acceptance as 4-bit
 * weights do: a few entries of a hidden state are a thousand times the others and would round them to zero. A group's
 * products are summed in 32 bits (32 * 127 * 32767 is below 2^31), then scaled; offsets meet the sums of x's groups.
 *
 * W is read row by row, for memory's prefetcher follows one stream better than four. Scales are bfloat16, two in a
 * word: the even group's is widened by a shift, the odd one's by a mask. Rows of W are padded with zeros to an even
 * number of groups, rows of offsets to a multiple of 16. In 4 bits, byte j of a group holds weight j in its lower half
 * and weight 16 + j in its upper.
 *
 * Compiled at run time by quantised.py with the system's C compiler for the machine it runs on. Threads come from the
 * OpenMP runtime that torch has loaded.
 */
#include <stdint.h>
#include <string.h>
#ifdef __AVX2__
#include <immintrin.h>
#endif

#define GROUP 32
#define BLOCK 16     /* groups whose offsets are widened at a time */
#define MOST_ROWS 4  /* rows of x at a time */
#define AHEAD 4096   /* bytes of W that are fetched before they are needed */
#define LARGEST 32767.0f
#define ROUNDER 12582912.0f /* 1.5 * 2^23: added to a small number, it leaves the nearest integer in the lower bits */

typedef float floats __attribute__((vector_size(32)));
typedef int32_t ints __attribute__((vector_size(32)));
typedef uint32_t words __attribute__((vector_size(32)));
typedef int16_t shorts __attribute__((vector_size(32)));
typedef int8_t bytes __attribute__((vector_size(16)));

typedef struct {
    const int16_t *rounded; /* [n, groups * GROUP] */
    const float *sums;      /* [n, blocks * BLOCK]; of each block, those of even groups first */
    const float *scales;    /* [n] */
} input;

static inline floats as_floats(words w) {
    floats f;
    memcpy(&f, &w, sizeof f);
    return f;
}

static inline shorts widened(const int8_t *w) {
    bytes b;
    memcpy(&b, w, sizeof b);
#ifdef __AVX2__
    return (shorts)_mm256_cvtepi8_epi16((__m128i)b); /* GCC 12 makes several instructions of the line below */
#else
    return __builtin_convertvector(b, shorts);
#endif
}

/* sums of neighbours' products */
static inline ints dot(shorts a, shorts b) {
#ifdef __AVX2__
    return (ints)_mm256_madd_epi16((__m256i)a, (__m256i)b);
#else
    ints sum;
    for (int i = 0; i < 8; i++) sum[i] = a[2 * i] * b[2 * i] + a[2 * i + 1] * b[2 * i + 1];
    return sum;
#endif
}

/* one row of W for `rows` rows of x; rows and bits are constants where it is inlined, so that sums live in registers */
static inline __attribute__((always_inline)) void tile(
    input x, const int8_t *w, const uint16_t *scales, const uint16_t *offsets, float bias, float *y, int64_t groups,
    int64_t out, const int rows, const int bits) {
    const int64_t blocks = (groups + BLOCK - 1) / BLOCK, size = GROUP * bits / 8;
    floats sums[2][MOST_ROWS] = {{{0}}}; /* two, for a sum waits for the one before */
    for (int64_t g = 0; g < groups; g += 2) {
        uint32_t pair;
        memcpy(&pair, scales + g, sizeof pair);
        __builtin_prefetch(w + g * size + AHEAD);
#pragma GCC unroll 2
        for (int odd = 0; odd < 2; odd++) {
            const words both = (words){0} + pair;
            const floats scale = as_floats(odd ? both & 0xffff0000u : both << 16);
            const int8_t *codes = w + (g + odd) * size;
            const shorts packed = widened(codes);
            const shorts first = bits == 4 ? packed & 15 : packed;
            const shorts second = bits == 4 ? (packed >> 4) & 15 : widened(codes + sizeof(bytes));
#pragma GCC unroll 4
            for (int r = 0; r < rows; r++) {
                shorts a, b;
                memcpy(&a, x.rounded + (r * groups + g + odd) * GROUP, sizeof a);
                memcpy(&b, x.rounded + (r * groups + g + odd) * GROUP + GROUP / 2, sizeof b);
                sums[odd][r] += scale * __builtin_convertvector(dot(first, a) + dot(second, b), floats);
            }
        }
    }
    for (int64_t k = 0; bits == 4 && k < blocks; k++) {
        words pairs;
        memcpy(&pairs, offsets + k * BLOCK, sizeof pairs);
#pragma GCC unroll 4
        for (int r = 0; r < rows; r++) {
            floats even, odd;
            memcpy(&even, x.sums + (r * blocks + k) * BLOCK, sizeof even);
            memcpy(&odd, x.sums + (r * blocks + k) * BLOCK + BLOCK / 2, sizeof odd);
            sums[0][r] += as_floats(pairs << 16) * even;
            sums[1][r] += as_floats(pairs & 0xffff0000u) * odd;
        }
    }
    for (int r = 0; r < rows; r++) {
        const floats lanes = sums[0][r] + sums[1][r];
        float sum = 0;
        for (int lane = 0; lane < 8; lane++) sum += lanes[lane];
        y[r * out] = sum * x.scales[r] + bias;
    }
}

static inline __attribute__((always_inline)) void row(
    input x, const int8_t *w, const uint16_t *scales, const uint16_t *offsets, float bias, float *y, int64_t n,
    int64_t groups, int64_t out, const int bits) {
    const int64_t blocks = (groups + BLOCK - 1) / BLOCK;
    for (int64_t tiles = (n + MOST_ROWS - 1) / MOST_ROWS; tiles > 0; tiles--) {
        const int64_t rows = (n + tiles - 1) / tiles; /* tiles alike: one of a single row wastes most */
        switch (rows) {
        case 1: tile(x, w, scales, offsets, bias, y, groups, out, 1, bits); break;
        case 2: tile(x, w, scales, offsets, bias, y, groups, out, 2, bits); break;
        case 3: tile(x, w, scales, offsets, bias, y, groups, out, 3, bits); break;
        case 4: tile(x, w, scales, offsets, bias, y, groups, out, 4, bits); break;
        }
        n -= rows;
        x.rounded += rows * groups * GROUP;
        x.sums += rows * blocks * BLOCK;
        x.scales += rows;
        y += rows * out;
    }
}

/* a row of x in 16 bits, padded with zeros; returns its scale */
static float round_row(const float *x, int16_t *rounded, int64_t in, int64_t padded) {
    uint32_t top = 0; /* absolute values order like their bits, and integers have a maximum in vectors */
    for (int64_t k = 0; k < in; k++) {
        uint32_t word;
        memcpy(&word, x + k, sizeof word);
        word &= 0x7fffffffu;
        top = word > top ? word : top;
    }
    float largest;
    memcpy(&largest, &top, sizeof largest);
    const float inverse = largest > 1e-30f ? LARGEST / largest : 0;
    for (int64_t k = 0; k < in; k++) {
        const float shifted = x[k] * inverse + ROUNDER;
        uint32_t word;
        memcpy(&word, &shifted, sizeof word);
        rounded[k] = (int16_t)word;
    }
    memset(rounded + in, 0, sizeof(int16_t) * (padded - in));
    return largest / LARGEST;
}

static void sum_groups(const int16_t *rounded, float *sums, int64_t groups) {
    for (int64_t g = 0; g < groups; g++) {
        int32_t sum = 0;
        for (int k = 0; k < GROUP; k++) sum += rounded[g * GROUP + k];
        sums[g / BLOCK * BLOCK + g % 2 * (BLOCK / 2) + g % BLOCK / 2] = (float)sum;
    }
}

/* x [n, in]; scratch [n * (1 + 16 * ceil(groups / 16) + 16 * groups)]; w [out, groups * 32] in `bits` bits;
 * scales [out, groups] and, in 4 bits, offsets [out, 16 * ceil(groups / 16)] bfloat16; bias [out] or NULL; y [n, out];
 * all contiguous, groups even */
void quantised_linear(
    const float *x, float *scratch, const int8_t *w, const uint16_t *scales, const uint16_t *offsets,
    const float *bias, float *y, int64_t n, int64_t in, int64_t out, int64_t groups, int64_t bits) {
    const int64_t blocks = (groups + BLOCK - 1) / BLOCK, width = groups * GROUP;
    float *x_scales = scratch, *sums = scratch + n;
    int16_t *rounded = (int16_t *)(sums + n * blocks * BLOCK);
    memset(sums, 0, sizeof(float) * n * blocks * BLOCK);
    for (int64_t r = 0; r < n; r++) {
        x_scales[r] = round_row(x + r * in, rounded + r * width, in, width);
        if (bits == 4) sum_groups(rounded + r * width, sums + r * blocks * BLOCK, groups);
    }
    const input all = {rounded, sums, x_scales};
#pragma omp parallel for schedule(static)
    for (int64_t c = 0; c < out; c++) {
        const float b = bias ? bias[c] : 0;
        const uint16_t *s = scales + c * groups;
        if (bits == 4)
            row(all, w + c * width / 2, s, offsets + c * blocks * BLOCK, b, y + c, n, groups, out, 4);
        else
            row(all, w + c * width, s, 0, b, y + c, n, groups, out, 8);
    }
}
