/* What surrounds the large products of a forward, in float32: attention of ragged rows over a long cache, norms, gates
 * and rotary positions. A library's operators read a batch up to its longest row and cost more to call than
 * to compute here.
 *
 * Attention goes over the keys in blocks and keeps each query's maximum, sum and output up to date (Milakov and
 * Gimelshein 2018, "Online normalizer calculation for softmax"), so that keys and values are read once for all queries
 * that share them, and only up to the last one that any of them sees.
 *
 * Compiled at run time by half.py's compiler call; threads come from the OpenMP runtime that torch has loaded.
 */
#include <float.h>
#include <math.h>
#include <stdint.h>
#include <string.h>

int omp_get_num_threads(void); /* of the runtime that torch has loaded; its header may not be installed */
int omp_get_thread_num(void);

#define LANES 8
#define KEYS 64           /* in a block; a multiple of LANES */
#define MOST_QUERIES 32   /* of a task: a few tokens of a row, the heads of one key/value head; decode.py knows it, too */
#define MOST_WIDTH 256    /* of a head; likewise */
#define TILE 4            /* queries at a time */
#define UNSEEN (-1e30f)   /* a mask below this hides a key */
#define SERIAL 16384      /* numbers that are not worth a second thread */

typedef float vector __attribute__((vector_size(4 * LANES)));
typedef float quarter __attribute__((vector_size(2 * LANES)));
typedef int32_t ints __attribute__((vector_size(4 * LANES)));

static inline vector load(const float *p) {
    vector v;
    memcpy(&v, p, sizeof v);
    return v;
}

static inline void store(float *p, vector v) { memcpy(p, &v, sizeof v); }

static inline float total(vector v) {
    quarter parts[2];
    memcpy(parts, &v, sizeof v);
    parts[0] += parts[1];
    return (parts[0][0] + parts[0][1]) + (parts[0][2] + parts[0][3]);
}

/* a where ``where`` is set, b elsewhere */
static inline vector chosen(ints where, vector a, vector b) {
    ints one, other;
    memcpy(&one, &a, sizeof a);
    memcpy(&other, &b, sizeof b);
    one = (one & where) | (other & ~where);
    memcpy(&a, &one, sizeof a);
    return a;
}

/* e^x for x <= 0, by 2^n times a Taylor polynomial of the rest, which is below ln 2 / 2; 0 where x < -87 */
static inline vector exponential(vector x) {
    const vector shift = (vector){0} + 12582912.0f; /* 1.5 * 2^23: adding it rounds to a whole number */
    const ints gone = x < -87.0f; /* not where x is no number: that has to be seen */
    const vector shifted = x * 1.44269504f + shift, n = shifted - shift;
    const vector r = (x - n * 0.693359375f) + n * 2.12194440e-4f; /* ln 2 in two parts */
    vector y = (vector){0} + 1.0f / 5040;
    y = y * r + 1.0f / 720;
    y = y * r + 1.0f / 120;
    y = y * r + 1.0f / 24;
    y = y * r + 1.0f / 6;
    y = y * r + 0.5f;
    y = y * r + 1.0f;
    y = y * r + 1.0f;
    ints power, base;
    memcpy(&power, &shifted, sizeof power);
    memcpy(&base, &shift, sizeof base);
    power = (power - base + 127) << 23;
    vector scale;
    memcpy(&scale, &power, sizeof scale);
    return chosen(gone, (vector){0}, y * scale);
}

/* products of ``queries`` rows of q [*, d] with ``keys`` rows of k, into scores [*, KEYS] */
static inline __attribute__((always_inline)) void products(
    const float *q, const float *k, float *scores, int64_t keys, int64_t d, int64_t k_slot, const int queries) {
    int64_t j = 0;
    for (; j + 2 <= keys; j += 2) { /* two at once: a sum waits for the one before it */
        const float *here = k + j * k_slot, *next = here + k_slot;
        vector sums[TILE] = {{0}}, others[TILE] = {{0}};
        for (int64_t i = 0; i < d; i += LANES) {
            const vector key = load(here + i), other = load(next + i);
            for (int t = 0; t < queries; t++) {
                const vector query = load(q + t * d + i);
                sums[t] += key * query;
                others[t] += other * query;
            }
        }
        for (int t = 0; t < queries; t++) {
            scores[t * KEYS + j] = total(sums[t]);
            scores[t * KEYS + j + 1] = total(others[t]);
        }
    }
    for (; j < keys; j++)
        for (int t = 0; t < queries; t++) {
            vector sum = {0};
            for (int64_t i = 0; i < d; i += LANES) sum += load(k + j * k_slot + i) * load(q + t * d + i);
            scores[t * KEYS + j] = total(sum);
        }
}

/* adds ``keys`` rows of v, weighted by scores [*, KEYS], to ``queries`` rows of sums [*, d] */
static inline __attribute__((always_inline)) void weigh(
    const float *scores, const float *v, float *sums, int64_t keys, int64_t d, int64_t v_slot, const int queries) {
    int64_t i = 0;
    for (; i + 2 * LANES <= d; i += 2 * LANES) {
        vector left[TILE], right[TILE];
        for (int t = 0; t < queries; t++) left[t] = load(sums + t * d + i), right[t] = load(sums + t * d + i + LANES);
        for (int64_t j = 0; j < keys; j++) {
            const vector a = load(v + j * v_slot + i), b = load(v + j * v_slot + i + LANES);
            for (int t = 0; t < queries; t++) left[t] += a * scores[t * KEYS + j], right[t] += b * scores[t * KEYS + j];
        }
        for (int t = 0; t < queries; t++) store(sums + t * d + i, left[t]), store(sums + t * d + i + LANES, right[t]);
    }
    for (; i < d; i += LANES)
        for (int t = 0; t < queries; t++) {
            vector sum = load(sums + t * d + i);
            for (int64_t j = 0; j < keys; j++) sum += load(v + j * v_slot + i) * scores[t * KEYS + j];
            store(sums + t * d + i, sum);
        }
}

/* scores [KEYS] to e^(score - maximum); what was summed up before is scaled to the new maximum */
static inline void soften(float *scores, const float *mask, int64_t keys, float *most, float *sum, float *out, int64_t d) {
    float top = *most;
    for (int64_t j = 0; j < keys; j++) {
        scores[j] += mask[j];
        top = scores[j] > top ? scores[j] : top;
    }
    for (int64_t j = keys; j % LANES; j++) scores[j] = -FLT_MAX;
    vector sums = {0};
    for (int64_t j = 0; j < keys; j += LANES) {
        const vector weights = exponential(load(scores + j) - top);
        store(scores + j, weights);
        sums += weights;
    }
    if (top != *most) {
        const float factor = exponential((vector){0} + (*most - top))[0];
        for (int64_t i = 0; i < d; i += LANES) store(out + i, load(out + i) * factor);
        *sum *= factor;
        *most = top;
    }
    *sum += total(sums);
}

typedef struct {
    int64_t row, head, token; /* strides in numbers; the token of a key or value is its slot */
} strides;

/* a task; q, mask and out at its first query */
static void attend(
    const float *q, strides qs, const float *k, int64_t k_slot, const float *v, int64_t v_slot, const float *mask,
    int64_t mask_token, float *out, strides os, int64_t group, int64_t m, int64_t d, int64_t width, float scale) {
    float queries[MOST_QUERIES * MOST_WIDTH], sums[MOST_QUERIES * MOST_WIDTH], scores[TILE * KEYS];
    float most[MOST_QUERIES], weight[MOST_QUERIES];
    const int64_t n = group * m;
    int64_t first = width, last = 0; /* keys that any query sees */
    for (int64_t i = 0; i < m; i++) {
        const float *seen = mask + i * mask_token;
        int64_t a = 0, b = width;
        while (a < first && seen[a] < UNSEEN) a++;
        while (b > last && seen[b - 1] < UNSEEN) b--;
        if (a < first) first = a;
        if (b > last) last = b;
    }
    for (int64_t t = 0; t < n; t++) {
        const float *from = q + t / m * qs.head + t % m * qs.token;
        for (int64_t i = 0; i < d; i++) queries[t * d + i] = from[i] * scale, sums[t * d + i] = 0;
        most[t] = -FLT_MAX;
        weight[t] = 0;
    }
    for (int64_t j = first; j < last; j += KEYS) {
        const int64_t keys = last - j < KEYS ? last - j : KEYS;
        for (int64_t t = 0; t < n; t += TILE) {
            const int64_t few = n - t < TILE ? n - t : TILE;
            const float *key = k + j * k_slot, *value = v + j * v_slot;
            switch (few) {
            case 1: products(queries + t * d, key, scores, keys, d, k_slot, 1); break;
            case 2: products(queries + t * d, key, scores, keys, d, k_slot, 2); break;
            case 3: products(queries + t * d, key, scores, keys, d, k_slot, 3); break;
            default: products(queries + t * d, key, scores, keys, d, k_slot, 4);
            }
            for (int64_t i = t; i < t + few; i++)
                soften(scores + (i - t) * KEYS, mask + i % m * mask_token + j, keys, most + i, weight + i, sums + i * d, d);
            switch (few) {
            case 1: weigh(scores, value, sums + t * d, keys, d, v_slot, 1); break;
            case 2: weigh(scores, value, sums + t * d, keys, d, v_slot, 2); break;
            case 3: weigh(scores, value, sums + t * d, keys, d, v_slot, 3); break;
            default: weigh(scores, value, sums + t * d, keys, d, v_slot, 4);
            }
        }
    }
    for (int64_t t = 0; t < n; t++) {
        float *to = out + t / m * os.head + t % m * os.token;
        for (int64_t i = 0; i < d; i++) to[i] = sums[t * d + i] / weight[t];
    }
}

/* q [rows, kv_heads * group, m, d], k and v [rows, kv_heads, width, d], mask [rows, m, width], each with its strides
 * (row, head, token) and a last dimension without gaps; out [rows, m, kv_heads * group, d] without gaps. With starts
 * [rows + 1] the tokens of all rows follow each other in one: q [1, heads, starts[rows], d], mask and out likewise. */
void attention(
    const float *q, const float *k, const float *v, const float *mask, float *out, const int64_t *strided,
    const int64_t *starts, int64_t rows, int64_t kv_heads, int64_t group, int64_t m, int64_t d, int64_t width,
    float scale) {
    const strides qs = {strided[0], strided[1], strided[2]}, ks = {strided[3], strided[4], strided[5]};
    const strides vs = {strided[6], strided[7], strided[8]}, os = {0, d, kv_heads * group * d};
    const int64_t at_once = MOST_QUERIES / group; /* tokens of a row */
#pragma omp parallel
    {
        const int64_t threads = omp_get_num_threads();
        int64_t turn = omp_get_thread_num(); /* tasks until this thread's next one */
        for (int64_t row = 0; row < rows; row++) {
            const int64_t start = starts ? starts[row] : row * m, end = starts ? starts[row + 1] : start + m;
            for (int64_t token = start; token < end; token += at_once)
                for (int64_t head = 0; head < kv_heads; head++, turn--) {
                    if (turn) continue;
                    turn = threads;
                    const int64_t place = starts ? 0 : row, within = token - (starts ? 0 : start);
                    attend(
                        q + place * qs.row + within * qs.token + head * group * qs.head, qs,
                        k + row * ks.row + head * ks.head, ks.token, v + row * vs.row + head * vs.head, vs.token,
                        mask + place * strided[9] + within * strided[10], strided[10],
                        out + token * os.token + head * group * os.head, os, group,
                        end - token < at_once ? end - token : at_once, d, width, scale);
                }
        }
    }
}

/* x, y [n, d], weight [d] */
void rms_norm(const float *x, const float *weight, float *y, int64_t n, int64_t d, float eps) {
#pragma omp parallel for schedule(static) if (n * d > SERIAL)
    for (int64_t row = 0; row < n; row++) {
        const float *from = x + row * d;
        vector squares = {0};
        for (int64_t i = 0; i < d; i += LANES) squares += load(from + i) * load(from + i);
        const float scale = 1 / sqrtf(total(squares) / (float)d + eps);
        for (int64_t i = 0; i < d; i += LANES) store(y + row * d + i, load(from + i) * scale * load(weight + i));
    }
}

/* x [n, 2 d]: silu of its first half times its second, y [n, d] */
void gated(const float *x, float *y, int64_t n, int64_t d) {
#pragma omp parallel for schedule(static) if (n * d > SERIAL)
    for (int64_t row = 0; row < n; row++)
        for (int64_t i = 0; i < d; i += LANES) {
            const vector gate = load(x + 2 * row * d + i), up = load(x + (2 * row + 1) * d + i);
            const ints positive = gate > 0;
            const vector decay = exponential(chosen(positive, -gate, gate)); /* of -|gate|, which cannot overflow */
            const vector above = chosen(positive, (vector){0} + 1.0f, decay);
            store(y + row * d + i, gate * (above / (1.0f + decay)) * up);
        }
}

/* x [rows, m, heads, d]: rotary positions for its first ``rotated`` heads, in place; cos and sin [rows, m, d] */
void rotate(
    float *x, const float *cos, const float *sin, int64_t cos_row, int64_t cos_token, int64_t sin_row, int64_t sin_token,
    int64_t rows, int64_t m, int64_t heads, int64_t rotated, int64_t d) {
    const int64_t half = d / 2;
#pragma omp parallel for schedule(static) if (rows * m * heads * d > SERIAL)
    for (int64_t place = 0; place < rows * m; place++) {
        const float *c = cos + place / m * cos_row + place % m * cos_token;
        const float *s = sin + place / m * sin_row + place % m * sin_token;
        for (int64_t head = 0; head < rotated; head++) {
            float *y = x + (place * heads + head) * d;
            for (int64_t i = 0; i < half; i += LANES) {
                const vector a = load(y + i), b = load(y + half + i), turn = load(s + i);
                store(y + i, a * load(c + i) - b * turn);
                store(y + half + i, b * load(c + half + i) + a * turn);
            }
        }
    }
}
