/* attention.c - attention over spans of K and V.
 *
 * One task is (sequence, KV head, tile of queries); its rows are the tile's queries times the
 * query heads of the group, so K and V are read once per group. A task walks the spans in order,
 * CHUNK keys at a time, in tiles, with one running softmax per row and chunk:
 *
 *     s = q k^T, masked by rule      m' = max(m, max s)      p = exp(s - m')
 *     acc = acc e^(m - m') + p v     sum = sum e^(m - m') + sum p     mass likewise, counted keys
 *
 * Chunks are merged by the same rule, in order. With a long context, few queries and idle threads
 * they are tasks of their own. No array of queries x keys exists beyond one tile. The order of a
 * row's sums follows from the spans alone: not from the tile of queries it stands in, not from
 * batch or threads.
 */
#include "cpu.h"

#include <math.h>
#include <string.h>

enum {
    KEYS = 64,         /* of a tile */
    CHUNK = 16 * KEYS, /* keys of one running softmax */
    TASKS = 4,         /* per thread are enough */
    FEW = 8,           /* queries of an item whose chunks may be tasks of their own */
    QUERY_ROWS = 192,  /* of a task, the group's heads counted: K and V are read once per task */
    WIDEN_ROWS = 24    /* from here on values are widened once, and nothing is asked for ahead */
};

typedef struct attention_job {
    kvc_stream *s;
    const kvc_attention *a;
    size_t group;   /* query heads per KV head */
    size_t tile;    /* queries per task */
    size_t rows;    /* of a full task: tile * group */
    size_t width;   /* head_dim rounded up to a panel */
    size_t n_tiles; /* of queries, over all items */
    size_t n_split; /* tasks per tile and KV head, a chunk each; 0: not split */
} attention_job;

/* What a softmax has summed so far, by row. */
typedef struct sums {
    float *acc;               /* [rows, width] */
    float *most, *sum, *mass; /* [rows + KVC_PANEL]: kernels work on whole vectors */
} sums;

/* One task's view of its scratch and of the job. */
typedef struct task {
    const attention_job *job;
    const kvc_attention_item *item;
    size_t first, n; /* queries of the item */
    size_t n_rows;   /* n * group */
    size_t row, end; /* rows that see something of the tile at hand */
    size_t kv_head;
    float *q;      /* [rows, head_dim], times scale */
    float *turned; /* [rows, head_dim], q as a span with an offset sees it */
    float *scores; /* [rows, KEYS] */
    float *keys;   /* [KEYS / KVC_PANEL, head_dim, KVC_PANEL] */
    float *values; /* [KEYS, width] */
    float *shrink; /* [rows + KVC_PANEL] */
    float *unused; /* [rows + KVC_PANEL] */
    sums chunk, total;
    const char *next_v; /* what to ask the memory for: the tile's values, or NULL, */
    const char *next_k; /* and the keys of the tile after it */
    size_t next_bytes;
    const cpu_gemm *gemm; /* by dtype; for few queries the one that asks for these */
} task;

static size_t sums_floats(const attention_job *job) {
    return job->rows * job->width + 3 * kvc_panel_round(job->rows + KVC_PANEL);
}

static size_t scratch_floats(const attention_job *job) {
    size_t dim = (size_t)job->a->head_dim;
    return 2 * sums_floats(job) + 2 * kvc_panel_round(job->rows + KVC_PANEL) +
           job->rows * (2 * dim + KEYS) + KEYS * (dim + job->width) + 5 * KVC_PANEL;
}

static float *take(float **from, size_t floats) {
    float *p = *from;
    *from += (floats + 15) / 16 * 16;
    return p;
}

static sums take_sums(const attention_job *job, float **from) {
    size_t rows = job->rows + KVC_PANEL;
    return (sums){take(from, job->rows * job->width), take(from, rows), take(from, rows),
                  take(from, rows)};
}

static void clear_sums(const task *t, sums *s) {
    for (size_t r = 0; r < t->n_rows + KVC_PANEL; r++) {
        s->most[r] = -INFINITY;
        s->sum[r] = s->mass[r] = 0;
    }
    memset(s->acc, 0, t->n_rows * t->job->width * sizeof(float));
}

static void load_queries(task *t) {
    const kvc_attention *a = t->job->a;
    size_t dim = (size_t)a->head_dim, group = t->job->group;
    const float *q = cpu_address(t->job->s, a->q);
    for (size_t i = 0; i < t->n; i++) {
        const float *from = q + (t->item->row + t->first + i) * a->q_ld + t->kv_head * group * dim;
        t->job->s->kernels->scaled_copy(t->q + i * group * dim, from, group * dim, a->scale);
    }
}

static void turn_queries(task *t, const float *turn) {
    size_t dim = (size_t)t->job->a->head_dim, half = (size_t)t->job->a->rotary_dim / 2;
    memcpy(t->turned, t->q, t->n_rows * dim * sizeof(float));
    for (size_t r = 0; r < t->n_rows; r++) {
        float *x = t->turned + r * dim;
        t->job->s->kernels->rotate(x, x + half, turn, turn + half, half);
    }
}

/* What query i of the task may see of a tile: columns [from, to) of its n keys. `own` is the index
 * of the tile's first key among the own keys, or -1 for given keys. */
typedef struct visible {
    size_t from, to;
} visible;

static visible visible_columns(const task *t, size_t i, const kvc_span *span, size_t key,
                               int64_t own, size_t n) {
    const kvc_attention_item *item = t->item;
    visible see = {0, n};
    if (own >= 0) {
        int64_t last = (int64_t)(item->own_first + t->first + i + item->slack) - own;
        see.to = last < 0 ? 0 : (uint64_t)last + 1 < n ? (size_t)last + 1 : n;
    }
    if (t->job->a->window) {
        int64_t q_pos = item->position + (int64_t)(t->first + i);
        int64_t hidden = q_pos - t->job->a->window - (span->position + (int64_t)key) + 1;
        if (hidden > 0) see.from = (uint64_t)hidden < see.to ? (size_t)hidden : see.to;
    }
    return see;
}

/* Cuts a tile of n keys down to the rows that see any of them, and to the keys before the last one
 * that is seen; 0: skip it. What a row does not see adds exact zeros to it, so no bit changes. */
static size_t cut_tile(task *t, const kvc_span *span, size_t key, int64_t own, size_t n) {
    size_t from = 0, to = t->n;
    t->row = 0;
    t->end = t->n_rows;
    if (t->job->a->soft) return n;
    visible first = visible_columns(t, 0, span, key, own, n);
    visible last = visible_columns(t, t->n - 1, span, key, own, n);
    if (first.from >= last.to) return 0;
    while (first.to == 0) first = visible_columns(t, ++from, span, key, own, n);
    while (last.from == n) last = visible_columns(t, --to - 1, span, key, own, n);
    t->row = from * t->job->group;
    t->end = to * t->job->group;
    return last.to;
}

static void hide(float *scores, size_t from, size_t to) {
    for (size_t j = from; j < to; j++) scores[j] = -INFINITY;
}

/* Hidden columns, and those that fill the last panel, become -inf. */
static void mask_scores(task *t, const kvc_span *span, size_t key, int64_t own, size_t n) {
    size_t group = t->job->group;
    bool soft = t->job->a->soft;
    visible first = visible_columns(t, t->row / group, span, key, own, n);
    visible last = visible_columns(t, t->end / group - 1, span, key, own, n);
    if (!soft && first.to == n && last.from == 0 && n % KVC_PANEL == 0) return;
    for (size_t r = t->row; r < t->end; r++) {
        visible see = visible_columns(t, r / group, span, key, own, n);
        float *s = t->scores + r * KEYS;
        if (soft) {
            for (size_t j = see.from; j < see.to; j++) s[j] += 1.0f;
            see = (visible){0, n};
        }
        hide(s, 0, see.from);
        hide(s, see.to, kvc_panel_round(n));
    }
}

/* Folds the tile's scores into the running softmax and leaves p in their place. */
static void soften(task *t, size_t n, size_t counted_from) {
    const cpu_kernels *kernels = t->job->s->kernels;
    size_t width = t->job->width, row = t->row;
    sums *s = &t->chunk;
    kernels->soften(t->scores + row * KEYS, KEYS, t->end - row, kvc_panel_round(n),
                    counted_from == 0, s->most + row, s->sum + row, s->mass + row, t->shrink + row);
    for (size_t r = row; r < t->end; r++) {
        if (t->shrink[r] != 1) kernels->scale(s->acc + r * width, width, t->shrink[r]);
    }
    if (counted_from == 0 || counted_from >= n) return;
    for (size_t r = row; r < t->end; r++) {
        s->mass[r] += kernels->sum(t->scores + r * KEYS + counted_from, n - counted_from);
    }
}

/* total += chunk: of both, what was summed shrinks to the larger maximum. A chunk's maximum is
 * softened like a tile with one column, which then holds its factor. */
static void merge_chunk(task *t, const sums *chunk) {
    const cpu_kernels *kernels = t->job->s->kernels;
    size_t width = t->job->width;
    for (size_t r = 0; r < t->n_rows; r++) {
        t->scores[r * KEYS] = chunk->most[r];
        hide(t->scores + r * KEYS, 1, KVC_PANEL);
    }
    kernels->soften(t->scores, KEYS, t->n_rows, KVC_PANEL, false, t->total.most, t->unused,
                    t->unused, t->shrink);
    for (size_t r = 0; r < t->n_rows; r++) {
        float shrink = t->shrink[r], factor = t->scores[r * KEYS];
        t->total.sum[r] = t->total.sum[r] * shrink + chunk->sum[r] * factor;
        t->total.mass[r] = t->total.mass[r] * shrink + chunk->mass[r] * factor;
        kernels->blend(t->total.acc + r * width, shrink, chunk->acc + r * width, factor, width);
    }
}

/* A task of few queries waits for K and V longer than it computes, and processors follow a stream by
 * themselves only within a page. So turning a tile's keys asks for its values, and the two products
 * for the next tile's keys, half each. */
static void set_next(task *t, const char *v, const char *k, size_t bytes) {
    bool few = t->n_rows < WIDEN_ROWS;
    t->next_v = few ? v : NULL;
    t->next_k = k;
    t->next_bytes = few ? bytes : 0;
    t->gemm = few ? t->job->s->kernels->near : t->job->s->kernels->gemm;
}

/* The share of one of them in the next tile's keys; all of it where only the mass is wanted. */
static cpu_next next_keys(const task *t, size_t part, size_t n_panels) {
    size_t parts = t->job->a->out.buffer ? 2 : 1, bytes = t->next_bytes / parts;
    return (cpu_next){t->next_k + part * bytes, bytes / n_panels, bytes / n_panels};
}

/* acc += p v. Values of 16 bits are widened on the way when few rows want them, else once. */
static void add_values(task *t, const kvc_span *span, const char *v, size_t n) {
    const cpu_kernels *kernels = t->job->s->kernels;
    size_t dim = (size_t)t->job->a->head_dim, width = t->job->width, rows = t->end - t->row;
    kvc_dtype dtype = span->dtype;
    const char *values = v;
    if (width != dim || (dtype != KVC_F32 && rows >= WIDEN_ROWS)) {
        for (size_t j = 0; j < n; j++) {
            float *to = t->values + j * width;
            kernels->to_f32[dtype](to, v + j * dim * kvc_dtype_bytes(dtype), dim);
            memset(to + dim, 0, (width - dim) * sizeof(float));
        }
        values = (const char *)t->values;
        dtype = KVC_F32;
    }
    cpu_next next = next_keys(t, 1, width / KVC_PANEL);
    t->gemm[dtype](t->chunk.acc + t->row * width, width, t->scores + t->row * KEYS, KEYS, values,
                   width, KVC_PANEL, rows, width / KVC_PANEL, n, true, &next);
}

/* Scores of n keys, which are turned into panels first, depth-major like a weight matrix. */
static void score_keys(task *t, const kvc_span *span, const float *q, const char *k, size_t n) {
    const cpu_kernels *kernels = t->job->s->kernels;
    size_t dim = (size_t)t->job->a->head_dim, n_panels = kvc_panel_round(n) / KVC_PANEL;
    for (size_t j = 0; j < n; j += KVC_PANEL) {
        size_t left = n - j < KVC_PANEL ? n - j : KVC_PANEL;
        size_t at = j * dim * kvc_dtype_bytes(span->dtype);
        kernels->transpose[span->dtype](t->keys + j * dim, KVC_PANEL, k + at, dim, left, dim,
                                        t->next_v ? t->next_v + at : NULL);
    }
    cpu_next next = next_keys(t, 0, n_panels);
    t->gemm[KVC_F32](t->scores + t->row * KEYS, KEYS, q + t->row * dim, dim, t->keys, KVC_PANEL,
                     dim * KVC_PANEL, t->end - t->row, n_panels, dim, false, &next);
}

/* Keys from .. to - 1 of a span, tile by tile; own: the index of key 0 among the own keys, or -1. */
static void walk_chunk(task *t, const kvc_span *span, size_t from, size_t to, int64_t own) {
    size_t key_bytes = (size_t)t->job->a->head_dim * kvc_dtype_bytes(span->dtype);
    size_t head = t->kv_head * span->head_stride * kvc_dtype_bytes(span->dtype);
    const char *k = (char *)cpu_address(t->job->s, span->k) + head;
    const char *v = (char *)cpu_address(t->job->s, span->v) + head;
    const float *q = span->turn ? t->turned : t->q;
    bool reads_v = t->job->a->out.buffer;
    for (size_t key = from; key < to; key += KEYS) {
        size_t n = to - key < KEYS ? to - key : KEYS;
        int64_t tile_own = own < 0 ? -1 : own + (int64_t)key;
        n = cut_tile(t, span, key, tile_own, n);
        if (n == 0) continue;
        size_t after = to - key < KEYS ? to : key + KEYS,
               ahead = to - after < KEYS ? to - after : KEYS;
        set_next(t, reads_v ? v + key * key_bytes : NULL, k + after * key_bytes, ahead * key_bytes);
        score_keys(t, span, q, k + key * key_bytes, n);
        mask_scores(t, span, key, tile_own, n);
        size_t counted = own >= 0 ? n : span->mass_from > key ? span->mass_from - key : 0;
        soften(t, n, counted);
        if (reads_v) add_values(t, span, v + key * key_bytes, n);
    }
}

/* The first chunk's sums are the total, as merging them into nothing would leave them. */
static void fold_chunk(task *t, bool first) {
    if (!first) {
        merge_chunk(t, &t->chunk);
        return;
    }
    sums total = t->chunk;
    t->chunk = t->total;
    t->total = total;
}

/* Chunk `only` of the item's keys, left in t->chunk, or all of them (only < 0), in t->total. */
static void walk_spans(task *t, int64_t only) {
    const kvc_attention_item *item = t->item;
    const kvc_span *turned = NULL;
    int64_t own = 0;
    size_t at = 0; /* keys before this place, of all spans */
    for (size_t i = 0; i < item->n_given + item->n_own; i++) {
        const kvc_span *span = &item->spans[i];
        for (size_t from = 0, n; from < span->n; from += n, at += n) {
            size_t room = CHUNK - at % CHUNK;
            n = span->n - from < room ? span->n - from : room;
            if (only >= 0 && at / CHUNK != (size_t)only) continue;
            if (span->turn && span != turned) turn_queries(t, span->turn);
            turned = span;
            if (at % CHUNK == 0) clear_sums(t, &t->chunk);
            walk_chunk(t, span, from, from + n, i < item->n_given ? -1 : own);
            if (only < 0 && n == room) fold_chunk(t, at < CHUNK);
        }
        if (i >= item->n_given) own += (int64_t)span->n;
    }
    if (only < 0 && at % CHUNK) fold_chunk(t, at < CHUNK);
    if (at == 0) clear_sums(t, &t->total);
}

static size_t count_chunks(const kvc_attention_item *item) {
    size_t n = 0;
    for (size_t i = 0; i < item->n_given + item->n_own; i++) n += item->spans[i].n;
    return (n + CHUNK - 1) / CHUNK;
}

static void store_results(const task *t) {
    const kvc_attention *a = t->job->a;
    size_t dim = (size_t)a->head_dim, group = t->job->group;
    for (size_t r = 0; r < t->n_rows; r++) {
        size_t row = t->item->row + t->first + r / group;
        size_t head = t->kv_head * group + r % group;
        float sum = t->total.sum[r], share = sum > 0 ? 1.0f / sum : sum; /* NaN passes through */
        if (a->out.buffer) {
            float *to = (float *)cpu_address(t->job->s, a->out) + row * a->out_ld + head * dim;
            t->job->s->kernels->scaled_copy(to, t->total.acc + r * t->job->width, dim, share);
        }
        if (a->mass.buffer) {
            float *mass = cpu_address(t->job->s, a->mass);
            mass[row * (size_t)a->n_heads + head] = t->total.mass[r] * share;
        }
    }
}

/* Which queries a task has: tiles are counted over items, the last tile of an item first, since
 * causal tiles grow with their place and long tasks should start early. */
static void find_tile(const attention_job *job, size_t tile, task *t) {
    const kvc_attention_item *item = job->a->items;
    size_t n_tiles = (item->n + job->tile - 1) / job->tile;
    while (tile >= n_tiles) {
        tile -= n_tiles;
        item++;
        n_tiles = (item->n + job->tile - 1) / job->tile;
    }
    t->item = item;
    t->first = (n_tiles - 1 - tile) * job->tile;
    t->n = item->n - t->first < job->tile ? item->n - t->first : job->tile;
}

static task make_task(const attention_job *job, size_t chunk, int worker) {
    size_t dim = (size_t)job->a->head_dim, n_kv_heads = (size_t)job->a->n_kv_heads;
    task t = {.job = job, .kv_head = chunk % n_kv_heads};
    find_tile(job, chunk / n_kv_heads, &t);
    t.n_rows = t.n * job->group;
    float *scratch = job->s->scratch + (size_t)worker * job->s->scratch_floats;
    t.q = take(&scratch, job->rows * dim);
    t.turned = take(&scratch, job->rows * dim);
    t.scores = take(&scratch, job->rows * KEYS);
    t.keys = take(&scratch, dim * KEYS);
    t.values = take(&scratch, KEYS * job->width);
    t.shrink = take(&scratch, job->rows + KVC_PANEL);
    t.unused = take(&scratch, job->rows + KVC_PANEL);
    t.chunk = take_sums(job, &scratch);
    t.total = take_sums(job, &scratch);
    return t;
}

static void attention_task(void *context, size_t chunk, int worker) {
    task t = make_task(context, chunk, worker);
    load_queries(&t);
    walk_spans(&t, -1);
    store_results(&t);
}

/* Where the sums of a chunk wait for the others. */
static sums shared_sums(const attention_job *job, size_t chunk, size_t part) {
    float *at = job->s->parts + (chunk * job->n_split + part) * sums_floats(job);
    return take_sums(job, &at);
}

static void split_task(void *context, size_t chunk, int worker) {
    const attention_job *job = context;
    size_t whole = chunk / job->n_split, part = chunk % job->n_split;
    task t = make_task(job, whole, worker);
    if (part >= count_chunks(t.item)) return;
    t.chunk = shared_sums(job, whole, part);
    load_queries(&t);
    walk_spans(&t, (int64_t)part);
}

static void merge_task(void *context, size_t chunk, int worker) {
    const attention_job *job = context;
    task t = make_task(job, chunk, worker);
    size_t n_chunks = count_chunks(t.item);
    clear_sums(&t, &t.total);
    for (size_t part = 0; part < n_chunks; part++) {
        sums shared = shared_sums(job, chunk, part);
        merge_chunk(&t, &shared);
    }
    store_results(&t);
}

/* Chunks become tasks when tiles and KV heads are too few to keep the threads busy. */
static size_t choose_split(const attention_job *job, size_t n_tasks) {
    size_t most = 0;
    if (n_tasks >= TASKS * (size_t)cpu_threads() || cpu_threads() == 1) return 0;
    for (size_t i = 0; i < job->a->n_items; i++) {
        size_t n = count_chunks(&job->a->items[i]);
        if (job->a->items[i].n > FEW) return 0;
        if (n > most) most = n;
    }
    return most > 1 ? most : 0;
}

kvc_status cpu_attention(kvc_stream *s, const kvc_attention *a, kvc_error *err) {
    attention_job job = {.s = s, .a = a, .group = (size_t)(a->n_heads / a->n_kv_heads)};
    size_t longest = 1;
    for (size_t i = 0; i < a->n_items; i++) {
        if (a->items[i].n > longest) longest = a->items[i].n;
    }
    job.tile = job.group < QUERY_ROWS ? QUERY_ROWS / job.group : 1;
    if (job.tile > longest) job.tile = longest;
    job.rows = job.tile * job.group;
    job.width = kvc_panel_round((size_t)a->head_dim);
    for (size_t i = 0; i < a->n_items; i++) {
        job.n_tiles += (a->items[i].n + job.tile - 1) / job.tile;
    }
    size_t n_tasks = job.n_tiles * (size_t)a->n_kv_heads;
    job.n_split = choose_split(&job, n_tasks);
    kvc_status status = cpu_scratch(s, scratch_floats(&job), err);
    if (status) return status;
    if (!job.n_split) return cpu_parallel(s, attention_task, &job, n_tasks, err);
    size_t n_parts;
    if (!kvc_mul(&n_parts, n_tasks, job.n_split) ||
        !kvc_mul(&n_parts, n_parts, sums_floats(&job) * sizeof(float))) {
        return kvc_fail(err, KVC_ERROR_MEMORY, "sums of attention overflow the address space");
    }
    status = cpu_parts(s, n_parts / sizeof(float), err);
    if (!status) status = cpu_parallel(s, split_task, &job, n_tasks * job.n_split, err);
    return status ? status : cpu_parallel(s, merge_task, &job, n_tasks, err);
}
