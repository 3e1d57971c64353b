/* session.c - one timeline: what it was given, and its own tail.
 *
 * Every layer has its own track, with its own length. Own token i stands at position
 * start_position + i (moved by `shift` in shifted layers): a position is never computed from how
 * many keys a layer holds. The tail is a list of blocks, so growing never copies; freezing closes
 * the blocks and shares them.
 */
#include "core.h"

#include <stdlib.h>
#include <string.h>

enum { BLOCK_TOKENS = 64 }; /* least room of a new block */

static bool has_tokens(const kvc_session *s) {
    for (int l = 0; l < s->model->config.n_layers; l++) {
        if (s->tracks[l].own_len) return true;
    }
    return false;
}

static kvc_status check_fresh(const kvc_session *s, const char *what, kvc_error *err) {
    if (!has_tokens(s)) return KVC_OK;
    return kvc_fail(err, KVC_ERROR_VALUE, "%s: the session has tokens of its own already", what);
}

kvc_status kvc_session_create(kvc_session **session, kvc_model *model, kvc_dtype kv_dtype,
                              kvc_error *err) {
    *session = NULL;
    if (!model->sealed) return kvc_fail(err, KVC_ERROR_VALUE, "the model is not sealed");
    if ((unsigned)kv_dtype >= KVC_DTYPE_COUNT) {
        return kvc_fail(err, KVC_ERROR_VALUE, "unknown KV dtype %d", kv_dtype);
    }
    kvc_session *s = NULL;
    TRY(kvc_host_alloc(&s, 1, sizeof *s, "a session", err));
    s->model = kvc_model_retain(model);
    s->kv_dtype = kv_dtype;
    size_t n = (size_t)model->config.n_layers;
    kvc_status status = kvc_host_alloc(&s->tracks, n, sizeof *s->tracks, "a session", err);
    if (!status) status = kvc_host_alloc(&s->shifted, n, 1, "a session", err);
    if (status) {
        kvc_session_free(s);
        return status;
    }
    *session = s;
    return KVC_OK;
}

static void clear_given(kvc_track *t) {
    for (size_t i = 0; t->turns && i < t->given.n; i++) free(t->turns[i]);
    free(t->turns);
    t->turns = NULL;
    kvc_parts_clear(&t->given);
    t->given_len = 0;
}

void kvc_session_free(kvc_session *session) {
    if (!session) return;
    for (int l = 0; session->tracks && l < session->model->config.n_layers; l++) {
        kvc_track *t = &session->tracks[l];
        clear_given(t);
        for (size_t i = 0; i < t->n_blocks; i++) kvc_segment_release(t->blocks[i].segment);
        free(t->blocks);
    }
    free(session->tracks);
    free(session->shifted);
    kvc_model_free(session->model);
    free(session);
}

/* ---- giving ---- */

static kvc_status check_kv(const kvc_session *s, const kvc_kv *kv, const int32_t *map,
                           kvc_error *err) {
    const kvc_config *c = &s->model->config;
    if (strcmp(kvc_device_name(kv->device), kvc_device_name(s->model->device)) != 0) {
        return kvc_fail(err, KVC_ERROR_MISMATCH, "the KV lives on %s, the receiver on %s",
                        kvc_device_name(kv->device), kvc_device_name(s->model->device));
    }
    if (kv->n_kv_heads != c->n_kv_heads || kv->head_dim != c->head_dim) {
        return kvc_fail(err, KVC_ERROR_MISMATCH,
                        "the KV has %d KV heads of %d, the receiver %d of %d", kv->n_kv_heads,
                        kv->head_dim, c->n_kv_heads, c->head_dim);
    }
    if (!map && kv->n_layers != c->n_layers) {
        return kvc_fail(err, KVC_ERROR_MISMATCH,
                        "the KV has %d layers, the receiver %d: a layer map is needed",
                        kv->n_layers, c->n_layers);
    }
    for (int l = 0; map && l < kv->n_layers; l++) {
        if (map[l] < 0 || map[l] >= c->n_layers) {
            return kvc_fail(err, KVC_ERROR_VALUE, "layer map: %d -> %d is not in 0 .. %d", l,
                            map[l], c->n_layers - 1);
        }
        for (int j = 0; j < l; j++) {
            if (map[j] != map[l] || !kv->layers[j].n || !kv->layers[l].n) continue;
            return kvc_fail(err, KVC_ERROR_MISMATCH,
                            "layer map: sender layers %d and %d both go to receiver layer %d", j, l,
                            map[l]);
        }
    }
    return KVC_OK;
}

/* A receiver sees a part with an offset by turning its query back by that much. */
static kvc_status make_turns(kvc_session *s, int layer, kvc_error *err) {
    kvc_track *t = &s->tracks[layer];
    int which = kvc_layer_rope(s->model, layer);
    size_t n_pairs = (size_t)s->model->config.rope[which].rotary_dim / 2;
    TRY(kvc_host_alloc(&t->turns, t->given.n, sizeof *t->turns, "a session", err));
    for (size_t i = 0; i < t->given.n; i++) {
        if (t->given.part[i].offset == 0) continue;
        TRY(kvc_host_alloc(&t->turns[i], 2 * n_pairs, sizeof(float), "a session", err));
        kvc_rope_angles(t->turns[i], s->model->inv_freq[which], n_pairs,
                        -(double)t->given.part[i].offset, 1.0);
    }
    return KVC_OK;
}

static kvc_status give_layer(kvc_session *s, int layer, const kvc_parts *parts, kvc_error *err) {
    kvc_track *t = &s->tracks[layer];
    for (size_t i = 0; i < parts->n; i++) {
        TRY(kvc_parts_add(&t->given, parts->part[i], err));
        t->given_len += parts->part[i].n;
    }
    return make_turns(s, layer, err);
}

kvc_status kvc_session_give(kvc_session *session, const kvc_kv *kv, const int32_t *layer_map,
                            kvc_error *err) {
    TRY(check_fresh(session, "give", err));
    TRY(check_kv(session, kv, layer_map, err));
    if (kv->next_position + session->shift < 0) {
        return kvc_fail(err, KVC_ERROR_VALUE,
                        "a shift of %lld moves the start %lld below position 0",
                        (long long)session->shift, (long long)kv->next_position);
    }
    for (int l = 0; l < session->model->config.n_layers; l++) {
        if (!session->tracks[l].given.n) continue;
        return kvc_fail(err, KVC_ERROR_VALUE,
                        "the session was given a KV before: join several with kvc_kv_concat");
    }
    kvc_status status = KVC_OK;
    for (int l = 0; l < kv->n_layers && !status; l++) {
        if (!kv->layers[l].n) continue;
        status = give_layer(session, layer_map ? layer_map[l] : l, &kv->layers[l], err);
    }
    if (status) {
        for (int l = 0; l < session->model->config.n_layers; l++) clear_given(&session->tracks[l]);
        return status;
    }
    session->start_position = kv->next_position;
    return KVC_OK;
}

kvc_status kvc_session_set_position(kvc_session *session, int64_t position, kvc_error *err) {
    TRY(check_fresh(session, "set_position", err));
    if (position < 0 || !kvc_position_fits(position) || position + session->shift < 0) {
        return kvc_fail(err, KVC_ERROR_VALUE,
                        "position %lld, with a shift of %lld, is out of range", (long long)position,
                        (long long)session->shift);
    }
    session->start_position = position;
    return KVC_OK;
}

kvc_status kvc_session_set_shift(kvc_session *session, int64_t shift, const uint8_t *shifted,
                                 kvc_error *err) {
    TRY(check_fresh(session, "set_shift", err));
    if (!kvc_position_fits(shift) || session->start_position + shift < 0) {
        return kvc_fail(err, KVC_ERROR_VALUE,
                        "a shift of %lld moves the start %lld below position 0", (long long)shift,
                        (long long)session->start_position);
    }
    session->shift = shift;
    memcpy(session->shifted, shifted, (size_t)session->model->config.n_layers);
    return KVC_OK;
}

/* ---- the tail ---- */

/* Closed blocks come first, then open ones that are filled in order: behind the first that has room
 * all are empty. */
static size_t room_left(const kvc_track *t) {
    size_t room = 0;
    for (size_t i = 0; i < t->n_blocks; i++) {
        if (!t->blocks[i].closed) room += t->blocks[i].segment->capacity - t->blocks[i].n;
    }
    return room;
}

static kvc_status add_block(kvc_session *s, kvc_track *t, size_t capacity, kvc_error *err) {
    const kvc_config *c = &s->model->config;
    if (t->n_blocks == t->blocks_capacity) {
        size_t room = t->blocks_capacity ? 2 * t->blocks_capacity : 4;
        kvc_block *grown = realloc(t->blocks, room * sizeof *grown);
        if (!grown) return kvc_fail(err, KVC_ERROR_MEMORY, "out of memory: %zu blocks", room);
        t->blocks = grown;
        t->blocks_capacity = room;
    }
    kvc_block block = {0};
    TRY(kvc_segment_create(&block.segment, s->model->device, c->n_kv_heads, c->head_dim,
                           s->kv_dtype, capacity, 0, err));
    t->blocks[t->n_blocks++] = block;
    return KVC_OK;
}

kvc_status kvc_session_make_room(kvc_session *s, int begin, int end, size_t n, kvc_error *err) {
    for (int l = begin; l < end; l++) {
        size_t room = room_left(&s->tracks[l]);
        if (room >= n) continue;
        size_t more = n - room < BLOCK_TOKENS ? BLOCK_TOKENS : n - room;
        TRY(add_block(s, &s->tracks[l], more, err));
    }
    return KVC_OK;
}

kvc_append kvc_session_append(kvc_session *s, int layer, size_t n) {
    kvc_track *t = &s->tracks[layer];
    kvc_block *block = t->blocks;
    while (block->closed || block->n == block->segment->capacity) block++;
    size_t room = block->segment->capacity - block->n;
    if (block->n == 0) {
        block->segment->position =
            s->start_position + kvc_session_layer_shift(s, layer) + (int64_t)t->own_len;
    }
    kvc_append to = {.n = n < room ? n : room,
                     .k = {block->segment->buffer, 0},
                     .v = {block->segment->buffer, block->segment->v_at},
                     .head_stride = block->segment->head_stride,
                     .at = block->n,
                     .dtype = s->kv_dtype};
    block->n += to.n;
    t->own_len += to.n;
    return to;
}

kvc_status kvc_session_reserve(kvc_session *session, size_t n, kvc_error *err) {
    int n_layers = session->model->config.n_layers;
    kvc_mark *marks = NULL;
    TRY(kvc_host_alloc(&marks, (size_t)n_layers, sizeof *marks, "a session", err));
    if (has_tokens(session)) kvc_session_mark(session, marks);
    else kvc_session_rewind(session, marks); /* nothing to keep: start with a block that fits */
    kvc_status status = kvc_session_make_room(session, 0, n_layers, n, err);
    if (status) kvc_session_rewind(session, marks);
    free(marks);
    return status;
}

void kvc_session_mark(const kvc_session *s, kvc_mark *marks) {
    for (int l = 0; l < s->model->config.n_layers; l++) {
        marks[l] = (kvc_mark){s->tracks[l].own_len, s->tracks[l].n_blocks};
    }
}

void kvc_session_rewind(kvc_session *s, const kvc_mark *marks) {
    for (int l = 0; l < s->model->config.n_layers; l++) {
        kvc_track *t = &s->tracks[l];
        kvc_track_truncate(t, marks[l].own_len);
        while (t->n_blocks > marks[l].n_blocks) {
            kvc_segment_release(t->blocks[--t->n_blocks].segment);
        }
    }
}

void kvc_track_truncate(kvc_track *t, size_t n) {
    for (size_t i = t->n_blocks; i-- && t->own_len > n;) {
        size_t drop = t->own_len - n < t->blocks[i].n ? t->own_len - n : t->blocks[i].n;
        t->blocks[i].n -= drop;
        t->own_len -= drop;
    }
}

void kvc_session_truncate(kvc_session *session, size_t n) {
    for (int l = 0; l < session->model->config.n_layers; l++) {
        kvc_track_truncate(&session->tracks[l], n);
    }
}

kvc_status kvc_session_freeze(kvc_session *session, kvc_kv **kv, kvc_error *err) {
    const kvc_config *c = &session->model->config;
    TRY(kvc_kv_create(kv, session->model->device, c->n_layers, c->n_kv_heads, c->head_dim,
                      session->kv_dtype, kvc_session_next_position(session), err));
    for (int l = 0; l < c->n_layers; l++) {
        const kvc_track *t = &session->tracks[l];
        for (size_t i = 0; i < t->n_blocks; i++) {
            if (!t->blocks[i].n) continue;
            kvc_part part = {t->blocks[i].segment, 0, t->blocks[i].n, 0};
            kvc_status status = kvc_parts_add(&(*kv)->layers[l], part, err);
            if (status) {
                kvc_kv_free(*kv);
                *kv = NULL;
                return status;
            }
        }
    }
    for (int l = 0; l < c->n_layers; l++) {
        kvc_track *t = &session->tracks[l];
        for (size_t i = 0; i < t->n_blocks; i++) {
            if (t->blocks[i].n) t->blocks[i].closed = true; /* a closed one stays closed */
        }
    }
    return KVC_OK;
}

/* ---- going on from another session's tail ---- */

static kvc_status check_tail(const kvc_session *s, const kvc_kv *tail, kvc_error *err) {
    TRY(check_fresh(s, "resume", err));
    TRY(check_kv(s, tail, NULL, err));
    if (tail->dtype != s->kv_dtype) {
        return kvc_fail(err, KVC_ERROR_MISMATCH, "the KV is %s, the session %s",
                        kvc_dtype_name(tail->dtype), kvc_dtype_name(s->kv_dtype));
    }
    for (int l = 0; l < tail->n_layers; l++) {
        int64_t position = s->start_position + kvc_session_layer_shift(s, l);
        for (size_t i = 0; i < tail->layers[l].n; i++) {
            const kvc_part *part = &tail->layers[l].part[i];
            int64_t at = part->segment->position + (int64_t)part->start + part->offset;
            if (at != position) {
                return kvc_fail(err, KVC_ERROR_MISMATCH,
                                "layer %d of the KV goes on at position %lld, the session at %lld",
                                l, (long long)at, (long long)position);
            }
            position += (int64_t)part->n;
        }
    }
    return KVC_OK;
}

/* Copies one part to the end of a layer's tail, which has room; bytes: scratch for all its keys of
 * a head. */
static kvc_status copy_part(kvc_session *s, kvc_stream *stream, int layer, const kvc_part *part,
                            void *bytes, kvc_error *err) {
    const kvc_backend *be = s->model->device->backend;
    const kvc_segment *from = part->segment;
    size_t token = (size_t)s->model->config.head_dim * kvc_dtype_bytes(s->kv_dtype);
    size_t element = kvc_dtype_bytes(s->kv_dtype);
    for (size_t done = 0; done < part->n;) {
        kvc_append to = kvc_session_append(s, layer, part->n - done);
        const kvc_mem sources[2] = {{from->buffer, 0}, {from->buffer, from->v_at}};
        const kvc_mem targets[2] = {to.k, to.v};
        for (int i = 0; i < 2 * s->model->config.n_kv_heads; i++) {
            size_t head = (size_t)i / 2;
            kvc_mem source = kvc_mem_at(sources[i % 2], head * from->head_stride * element +
                                                            (part->start + done) * token);
            kvc_mem target =
                kvc_mem_at(targets[i % 2], head * to.head_stride * element + to.at * token);
            TRY(be->download(stream, bytes, source, to.n * token, err));
            TRY(be->upload(stream, target, bytes, to.n * token, err));
        }
        done += to.n;
    }
    return KVC_OK;
}

static kvc_status copy_tail(kvc_session *s, const kvc_kv *tail, size_t longest, kvc_error *err) {
    kvc_backend *be = s->model->device->backend;
    size_t token = (size_t)s->model->config.head_dim * kvc_dtype_bytes(s->kv_dtype);
    void *bytes = NULL;
    kvc_stream *stream = NULL;
    kvc_status status = kvc_host_alloc(&bytes, longest, token, "a session", err);
    if (!status) status = be->stream_open(be, &stream, NULL, NULL, err);
    for (int l = 0; l < tail->n_layers && !status; l++) {
        status = kvc_session_make_room(s, l, l + 1, kvc_kv_length(tail, l), err);
        for (size_t i = 0; i < tail->layers[l].n && !status; i++) {
            status = copy_part(s, stream, l, &tail->layers[l].part[i], bytes, err);
        }
    }
    be->stream_close(stream);
    free(bytes);
    return status;
}

kvc_status kvc_session_resume(kvc_session *session, const kvc_kv *tail, kvc_error *err) {
    TRY(check_tail(session, tail, err));
    int n_layers = session->model->config.n_layers;
    size_t longest = 0;
    for (int l = 0; l < n_layers; l++) {
        if (kvc_kv_length(tail, l) > longest) longest = kvc_kv_length(tail, l);
    }
    kvc_mark *marks = NULL;
    TRY(kvc_host_alloc(&marks, (size_t)n_layers, sizeof *marks, "a session", err));
    kvc_session_mark(session, marks);
    kvc_status status = copy_tail(session, tail, longest, err);
    if (status) kvc_session_rewind(session, marks);
    free(marks);
    return status;
}

size_t kvc_session_given(const kvc_session *session, int layer) {
    return session->tracks[layer].given_len;
}

size_t kvc_session_length(const kvc_session *session, int layer) {
    return session->tracks[layer].own_len;
}

int64_t kvc_session_next_position(const kvc_session *session) {
    size_t longest = 0;
    for (int l = 0; l < session->model->config.n_layers; l++) {
        if (session->tracks[l].own_len > longest) longest = session->tracks[l].own_len;
    }
    return session->start_position + (int64_t)longest;
}
