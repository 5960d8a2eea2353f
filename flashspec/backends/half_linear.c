/* y = x W^T + b in float32, with W stored in bfloat16: half the memory traffic, the same numbers.
 *
 * A bfloat16 number is the upper half of a float32, so widening loses nothing. Decoding is bound by reading W, which
 * this does once: a strip of rows of W is in the first-level cache while all rows of x pass, and the next strip is
 * fetched meanwhile. Sixteen weights lie in eight 32-bit words; the even ones are widened by a shift, the odd ones by
 * a mask, and x is brought into the same order first.
 *
 * Compiled at run time by half.py with the system's C compiler for the machine it runs on. Threads come from the
 * OpenMP runtime that torch has loaded.
 */
#include <stdint.h>
#include <string.h>

#define LANES 8
#define BLOCK (2 * LANES) /* weights widened at a time */
#define LINE 32           /* weights in a cache line */
#define FAR 4096          /* weights; short strips are done sooner than a read from memory */
#define LONG_STRIP 12288  /* weights; in a longer one that order brings the later rows too late */
#define MOST_COLUMNS 3    /* rows of W at a time: 3 x 4 or 2 x 6 sums, the weights and an input fill 16 registers */
#define MOST_ROWS 6       /* rows of x at a time */

typedef float vector __attribute__((vector_size(4 * LANES)));
typedef uint32_t words __attribute__((vector_size(4 * LANES)));

static inline vector as_floats(words w) {
    vector v;
    memcpy(&v, &w, sizeof v);
    return v;
}

static inline float widened(uint16_t half) {
    uint32_t word = (uint32_t)half << 16;
    float f;
    memcpy(&f, &word, sizeof f);
    return f;
}

/* columns x rows outputs; both are constants where it is inlined, so that the sums live in registers */
static inline __attribute__((always_inline)) void tile(
    const float *x, const uint16_t *w, const float *bias, float *y, int64_t in, int64_t out, const int columns,
    const int rows, const int64_t ahead, const int in_order) {
    vector sums[MOST_COLUMNS][MOST_ROWS] = {{{0}}};
    int64_t k = 0;
    for (; k + BLOCK <= in; k += BLOCK) {
        vector even[MOST_COLUMNS], odd[MOST_COLUMNS];
        for (int c = 0; c < columns; c++) {
            words pairs;
            if (ahead && k % LINE == 0) __builtin_prefetch(w + (in_order ? columns * k + c * LINE : c * in + k) + ahead);
            memcpy(&pairs, w + c * in + k, sizeof pairs);
            even[c] = as_floats(pairs << 16);
            odd[c] = as_floats(pairs & 0xffff0000u);
        }
        for (int r = 0; r < rows; r++) {
            vector input;
            memcpy(&input, x + r * in + k, sizeof input);
            for (int c = 0; c < columns; c++) sums[c][r] += even[c] * input;
            memcpy(&input, x + r * in + k + LANES, sizeof input);
            for (int c = 0; c < columns; c++) sums[c][r] += odd[c] * input;
        }
    }
    for (int c = 0; c < columns; c++)
        for (int r = 0; r < rows; r++) {
            float sum = bias ? bias[c] : 0;
            for (int lane = 0; lane < LANES; lane++) sum += sums[c][r][lane];
            for (int64_t rest = k; rest < in; rest++) sum += widened(w[c * in + rest]) * x[r * in + rest];
            y[r * out + c] = sum;
        }
}

static inline __attribute__((always_inline)) void strip(
    const float *x, const uint16_t *w, const float *bias, float *y, int64_t n, int64_t in, int64_t out,
    const int columns, const int most_rows) {
    const int64_t tiles = (n + most_rows - 1) / most_rows;
    /* What comes next is fetched from memory during the first tile of this strip. With one or two rows of x the memory is
     * waited for: then in the order in which it lies there, and far enough ahead for it to answer in time. */
    const int in_order = n <= 2 && columns * in <= LONG_STRIP;
    int64_t ahead = in_order && columns * in < FAR ? FAR : columns * in;
    for (int64_t i = 0; i < tiles; i++, ahead = 0) {
        const int64_t rows = (n + tiles - i - 1) / (tiles - i); /* tiles alike: one of a single row wastes most */
        switch (rows) {
        case 1: tile(x, w, bias, y, in, out, columns, 1, ahead, in_order); break;
        case 2: tile(x, w, bias, y, in, out, columns, 2, ahead, in_order); break;
        case 3: tile(x, w, bias, y, in, out, columns, 3, ahead, 0); break;
        case 4: tile(x, w, bias, y, in, out, columns, 4, ahead, 0); break;
        case 5: tile(x, w, bias, y, in, out, columns, 5, ahead, 0); break;
        case 6: tile(x, w, bias, y, in, out, columns, 6, ahead, 0); break;
        }
        n -= rows;
        x += rows * in;
        y += rows * out;
    }
}

/* each block of x: its even entries, then its odd ones */
static void sort_blocks(const float *x, float *sorted, int64_t n, int64_t in) {
    for (int64_t r = 0; r < n; r++, x += in, sorted += in) {
        int64_t k = 0;
        for (; k + BLOCK <= in; k += BLOCK)
            for (int i = 0; i < LANES; i++) {
                sorted[k + i] = x[k + 2 * i];
                sorted[k + LANES + i] = x[k + 2 * i + 1];
            }
        for (; k < in; k++) sorted[k] = x[k];
    }
}

/* x and scratch [n, in], w [out, in] bfloat16, bias [out] or NULL, y [n, out]; all contiguous */
void half_linear(
    const float *x, float *scratch, const uint16_t *w, const float *bias, float *y, int64_t n, int64_t in,
    int64_t out) {
    const int64_t columns = (n <= 4 || n == 7 || n == 8) ? 3 : 2, strips = out / columns;
    sort_blocks(x, scratch, n, in);
#pragma omp parallel for schedule(static)
    for (int64_t s = 0; s < strips; s++) {
        const int64_t c = s * columns;
        const float *part = bias ? bias + c : 0;
        if (columns == 3)
            strip(scratch, w + c * in, part, y + c, n, in, out, 3, 4);
        else
            strip(scratch, w + c * in, part, y + c, n, in, out, 2, 6);
    }
    for (int64_t c = strips * columns; c < out; c++)
        strip(scratch, w + c * in, bias ? bias + c : 0, y + c, n, in, out, 1, 6);
}
