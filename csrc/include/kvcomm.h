/* kvcomm.h - the C API of kvcomm: one model answers from another model's KV cache.
 *
 * This header is the manual. The nouns, from the outside in:
 *
 *   kvc_device     where buffers live and operations run ("cpu", "cuda", "guard")
 *   kvc_model      configuration and weights on one device; immutable once sealed, shared freely
 *   kvc_kv         a message: per layer a list of references to immutable blocks of K and V
 *   kvc_session    one timeline: the KV it was given, and its own growing tail
 *   kvc_workspace  scratch for one forward call at a time
 *   kvc_batch      what one forward call does: rows (session + tokens) and what to return
 *
 * One exchange: the sender's session runs over the context and is frozen into a kvc_kv; layers
 * are selected from it; the receiver's session is given the rest and runs over the question.
 *
 * Rules. Every function that can fail returns kvc_status and takes a caller-owned kvc_error last;
 * whoever detects a fault writes its one-line message there. x_create / x_free pair up and free
 * takes NULL. Arrays are row-major, shapes stand in square brackets, ids are int32. Layers count
 * from 0. Nothing here prints, exits, or keeps a pointer to caller memory after it returns.
 * Threads: models and kvs may be shared by any number of threads; a session or a workspace is
 * used by one thread at a time.
 */
#ifndef KVCOMM_H
#define KVCOMM_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* ---- errors ---------------------------------------------------------------------------- */

typedef enum kvc_status {
    KVC_OK = 0,
    KVC_ERROR_VALUE,       /* an argument out of range or inconsistent */
    KVC_ERROR_MEMORY,      /* an allocation refused, or a size that overflows */
    KVC_ERROR_MISMATCH,    /* two things that must fit do not */
    KVC_ERROR_UNSUPPORTED, /* valid, but not handled here */
    KVC_ERROR_NUMERIC,     /* values that are not finite */
    KVC_ERROR_DEVICE,      /* a device that is absent or refused an operation */
    KVC_ERROR_READ,        /* a source of bytes that could not be read */
    KVC_ERROR_INTERRUPTED  /* the caller's interrupt hook asked to stop */
} kvc_status;

typedef struct kvc_error {
    kvc_status code;
    char message[500]; /* one line, NUL-terminated */
} kvc_error;

/* ---- devices and threads --------------------------------------------------------------- */

/* The floats that K, V and vectors may be held in; matrices also in blocks. */
typedef enum kvc_dtype {
    KVC_F32 = 0,
    KVC_F16,
    KVC_BF16,
    KVC_DTYPE_COUNT,
    /* 32 values of a row with one f16 scale, bytes as GGUF has them: */
    KVC_Q8_0 = KVC_DTYPE_COUNT, /* scale * q, q in -128 .. 127: 34 bytes */
    KVC_Q4_0,                   /* scale * (q - 8), q in 0 .. 15: 18 bytes */
    KVC_Q4_1,                   /* scale * q + minimum: 20 bytes */
    KVC_MATRIX_DTYPE_COUNT
} kvc_dtype;

#define KVC_BLOCK 32 /* values in a block */

size_t kvc_dtype_bytes(kvc_dtype dtype); /* of one value; a block type: of a block */
/* of n values in a row; a block type: n is a multiple of KVC_BLOCK */
size_t kvc_row_bytes(kvc_dtype dtype, size_t n);
const char *kvc_dtype_name(kvc_dtype dtype); /* "f32", "f16", "bf16", "q8_0", "q4_0", "q4_1" */

typedef struct kvc_device kvc_device;

/* Opens "cpu", "cuda" or "guard". KVC_ERROR_DEVICE says why one is not there. Reference-counted:
 * models and kvs hold the device they live on, so the caller may close it at any time. */
kvc_status kvc_device_open(kvc_device **device, const char *name, kvc_error *err);
void kvc_device_close(kvc_device *device);
const char *kvc_device_name(const kvc_device *device);
/* One line: instruction set and kernels in use. */
const char *kvc_device_description(const kvc_device *device);

/* Threads of the one pool that all CPU work shares. n = 0: back to the default, which honours
 * KVCOMM_NUM_THREADS (else OMP_NUM_THREADS), the affinity mask and the cgroup quota. Waits for a
 * running region; not to be called from an interrupt hook. */
kvc_status kvc_set_num_threads(int n, kvc_error *err);
int kvc_get_num_threads(void);

/* ---- model ----------------------------------------------------------------------------- */

typedef enum kvc_rope_kind {
    KVC_ROPE_DEFAULT = 0,
    KVC_ROPE_LINEAR,
    KVC_ROPE_LLAMA3,
    KVC_ROPE_YARN
} kvc_rope_kind;

typedef struct kvc_rope {
    kvc_rope_kind kind;
    double theta;
    double factor;           /* linear, llama3, yarn */
    double low_freq_factor;  /* llama3 */
    double high_freq_factor; /* llama3 */
    double original_length;  /* llama3, yarn: positions the model was trained on */
    double beta_fast;        /* yarn */
    double beta_slow;        /* yarn */
    double attention_factor; /* yarn: cos and sin are multiplied by it */
    bool truncate;           /* yarn: round the ramp's ends to whole dimensions */
    int rotary_dim;          /* leading dimensions of a head that rotate; even */
} kvc_rope;

typedef enum kvc_activation { KVC_SILU = 0, KVC_GELU_TANH } kvc_activation;

/* One description for every family; a family is a set of values here, never a code path. */
typedef struct kvc_config {
    int n_layers;
    int dim;
    int hidden_dim; /* of the gated MLP */
    int n_heads;
    int n_kv_heads; /* divides n_heads; query head h reads KV head h / (n_heads / n_kv_heads) */
    int head_dim;
    int vocab_size;
    float norm_eps;
    float norm_offset; /* added to every norm weight: 1 for gemma, else 0 */
    float embed_scale; /* multiplies embeddings: sqrt(dim) for gemma, else 1 */
    float attention_scale;
    kvc_activation activation;
    bool qkv_bias;
    bool o_bias;
    bool mlp_bias;
    bool qk_norm;    /* RMS norm of each head of q and k, before rope */
    bool post_norms; /* norms after attention and after the MLP, before the residual */
    bool tied_head;
    int window;                   /* keys a windowed layer sees, own position included; 0: none */
    const uint8_t *windowed;      /* [n_layers] 1: the layer has the window; NULL: no layer */
    const uint8_t *rope_of_layer; /* [n_layers] index into rope; NULL: all 0 */
    kvc_rope rope[2];
} kvc_config;

typedef enum kvc_weight {
    KVC_W_EMBED = 0,  /* [vocab_size, dim] */
    KVC_W_HEAD,       /* [vocab_size, dim]; absent when tied_head */
    KVC_W_FINAL_NORM, /* [dim] */
    KVC_W_ATTN_NORM,  /* from here on one per layer: [dim] */
    KVC_W_Q,          /* [n_heads * head_dim, dim] */
    KVC_W_K,          /* [n_kv_heads * head_dim, dim] */
    KVC_W_V,
    KVC_W_O,      /* [dim, n_heads * head_dim] */
    KVC_W_Q_BIAS, /* [n_heads * head_dim] */
    KVC_W_K_BIAS,
    KVC_W_V_BIAS,
    KVC_W_O_BIAS, /* [dim] */
    KVC_W_Q_NORM, /* [head_dim] */
    KVC_W_K_NORM,
    KVC_W_POST_ATTN_NORM, /* [dim] */
    KVC_W_MLP_NORM,       /* [dim]: the norm before the MLP */
    KVC_W_GATE,           /* [hidden_dim, dim] */
    KVC_W_UP,
    KVC_W_DOWN, /* [dim, hidden_dim] */
    KVC_W_GATE_BIAS,
    KVC_W_UP_BIAS,
    KVC_W_DOWN_BIAS,
    KVC_W_POST_MLP_NORM, /* [dim] */
    KVC_W_COUNT
} kvc_weight;

const char *kvc_weight_name(kvc_weight weight); /* "embed", "q", "mlp_norm", ... */

typedef struct kvc_model kvc_model;

/* Matrices are held in `dtype`, vectors always in f32. The config is copied. Refuses a block type
 * for a matrix whose columns are not whole blocks. */
kvc_status kvc_model_create(kvc_model **model, kvc_device *device, const kvc_config *config,
                            kvc_dtype dtype, kvc_error *err);
/* The same with a type for each: dtypes [KVC_MATRICES(n_layers)] of embed, head (any, when it is
 * tied), and then of each layer q k v together, o, gate and up together, down. */
#define KVC_MATRICES(n_layers) (2 + 4 * (n_layers))
kvc_status kvc_model_create_mixed(kvc_model **model, kvc_device *device, const kvc_config *config,
                                  const kvc_dtype *dtypes, kvc_error *err);

/* Where a tensor's bytes come from. `read` copies bytes at .. at + n - 1 of the tensor to dst, or
 * returns false; several threads call it at once. */
typedef struct kvc_source {
    bool (*read)(void *context, void *dst, size_t at, size_t n);
    void *context;
} kvc_source;

/* Takes one tensor of `rows` x `cols` elements (a vector: rows 1), row-major, converting from
 * `dtype` by value, to nearest even. Blocks go into a matrix of the same type as they are; KVC_Q8_0
 * is also made of any other type, KVC_Q4_0 and KVC_Q4_1 of none. A few rows are held at a time.
 * Refuses a wrong shape, a tensor set twice or not wanted by the config, and values that are not
 * finite; KVC_ERROR_READ when `read` returned false. */
kvc_status kvc_model_read(kvc_model *model, kvc_weight weight, int layer, const kvc_source *source,
                          kvc_dtype dtype, size_t rows, size_t cols, kvc_error *err);
/* The same from caller memory, of any byte alignment. */
kvc_status kvc_model_set(kvc_model *model, kvc_weight weight, int layer, const void *data,
                         kvc_dtype dtype, size_t rows, size_t cols, kvc_error *err);
/* Checks that nothing is missing. Only a sealed model runs. */
kvc_status kvc_model_seal(kvc_model *model, kvc_error *err);
void kvc_model_free(kvc_model *model);
const kvc_config *kvc_model_config(const kvc_model *model);
kvc_device *kvc_model_device(const kvc_model *model); /* borrowed */
size_t kvc_model_bytes(const kvc_model *model);
/* Inverse frequencies of rope 0 or 1 into out [rotary_dim / 2]. */
kvc_status kvc_model_inv_freq(const kvc_model *model, int rope, double *out, kvc_error *err);

/* ---- KV: the message ------------------------------------------------------------------- */

typedef struct kvc_kv kvc_kv;

/* A view of one part of a layer. Keys are stored after rope, at positions position ..
 * position + n - 1; a receiver sees them moved by `offset` positions. */
typedef struct kvc_kv_part {
    const void
        *k; /* [n_kv_heads, n, head_dim], heads head_stride elements apart; NULL off the CPU */
    const void *v;
    size_t head_stride;
    size_t n;
    int64_t position;
    int64_t offset;
} kvc_kv_part;

/* An empty message of a geometry, to be filled with kvc_kv_add. */
kvc_status kvc_kv_create(kvc_kv **kv, kvc_device *device, int n_layers, int n_kv_heads,
                         int head_dim, kvc_dtype dtype, int64_t next_position, kvc_error *err);
/* Appends a copy of k and v [n_kv_heads, n, head_dim] (contiguous, the kv's dtype) to a layer. */
kvc_status kvc_kv_add(kvc_kv *kv, int layer, const void *k, const void *v, size_t n,
                      int64_t position, int64_t offset, kvc_error *err);
/* A message that shares the blocks of another: whole layers where keep[l] is 1, the first token
 * only (the attention sink) elsewhere when `sink` is set, nothing otherwise. keep: [n_layers]. */
kvc_status kvc_kv_select(kvc_kv **out, const kvc_kv *kv, const uint8_t *keep, bool sink,
                         kvc_error *err);
/* Drops from every layer with windowed[l] the keys that a receiver starting at next_position can
 * never see: all but the last window - 1. */
kvc_status kvc_kv_trim(kvc_kv **out, const kvc_kv *kv, const uint8_t *windowed, int window,
                       kvc_error *err);
/* Several senders into one message, parts in the order given; next_position is the sum. With
 * `sequential`, the keys of kv i move by the total length before it. A layer for which whole[l] is 0
 * keeps only the parts of the first kv. whole: [n_layers], or NULL: every layer is whole. */
kvc_status kvc_kv_concat(kvc_kv **out, const kvc_kv *const *kvs, size_t n_kvs, bool sequential,
                         const uint8_t *whole, kvc_error *err);
void kvc_kv_free(kvc_kv *kv);

int kvc_kv_layers(const kvc_kv *kv);
int kvc_kv_heads(const kvc_kv *kv);
int kvc_kv_head_dim(const kvc_kv *kv);
kvc_dtype kvc_kv_dtype(const kvc_kv *kv);
int64_t kvc_kv_next_position(const kvc_kv *kv);
size_t kvc_kv_length(const kvc_kv *kv, int layer); /* tokens held in that layer */
size_t kvc_kv_bytes(const kvc_kv *kv);             /* of the K and V a transfer would carry */
size_t kvc_kv_parts(const kvc_kv *kv, int layer);
kvc_status kvc_kv_part_view(const kvc_kv *kv, int layer, size_t part, kvc_kv_part *view,
                            kvc_error *err);

/* ---- session: one timeline ------------------------------------------------------------- */

typedef struct kvc_session kvc_session;

kvc_status kvc_session_create(kvc_session **session, kvc_model *model, kvc_dtype kv_dtype,
                              kvc_error *err);
void kvc_session_free(kvc_session *session);

/* Hands a message to a session that has none and no tail yet. Its keys become visible to every
 * later token of the layers that hold them; the next token's position is the kv's next_position.
 * layer_map [layers of kv]: receiver layer of each sender layer, or NULL for the identity (equal
 * depths). Shares the blocks. Refuses another geometry or device, and two layers that hold keys for
 * one receiver layer. */
kvc_status kvc_session_give(kvc_session *session, const kvc_kv *kv, const int32_t *layer_map,
                            kvc_error *err);
/* Before the first token: room for n tokens in one block per layer, so that freezing gives one
 * part per layer. Later: room for n more. */
kvc_status kvc_session_reserve(kvc_session *session, size_t n, kvc_error *err);
/* The position of the next token. Only before the session's first token. */
kvc_status kvc_session_set_position(kvc_session *session, int64_t position, kvc_error *err);
/* In layers with shifted[l] set, positions are moved by `shift` (shift_back). Only before the
 * session's first token. */
kvc_status kvc_session_set_shift(kvc_session *session, int64_t shift, const uint8_t *shifted,
                                 kvc_error *err);
/* Forgets own tokens beyond the first n. */
void kvc_session_truncate(kvc_session *session, size_t n);
/* The session's own tail as a message (what it was given is not in it). The session keeps what
 * it has and goes on; blocks are shared, later tokens go to new ones. */
kvc_status kvc_session_freeze(kvc_session *session, kvc_kv **kv, kvc_error *err);
/* Begins a session where another one stood that had run the same tokens: copies that one's frozen
 * tail, so that what follows has the bits it has behind tokens of its own. For prompts that begin
 * alike, after give and set_shift and before the first token; reserve room for the whole prompt
 * first, or the tail's blocks end where the copy does. Refuses another geometry, device, dtype, and
 * a tail at other positions than the session's. */
kvc_status kvc_session_resume(kvc_session *session, const kvc_kv *tail, kvc_error *err);
size_t kvc_session_given(const kvc_session *session, int layer);  /* tokens given in a layer */
size_t kvc_session_length(const kvc_session *session, int layer); /* own tokens in a layer */
int64_t kvc_session_next_position(const kvc_session *session);

/* ---- forward --------------------------------------------------------------------------- */

typedef struct kvc_workspace kvc_workspace;

/* Called now and then from the calling thread, at least once per layer; non-zero stops the call
 * with KVC_ERROR_INTERRUPTED. */
typedef int (*kvc_interrupt)(void *context);

kvc_status kvc_workspace_create(kvc_workspace **ws, kvc_model *model, kvc_interrupt interrupt,
                                void *context, kvc_error *err);
void kvc_workspace_free(kvc_workspace *ws);

/* Work done by a workspace so far, counted where it is done. */
typedef struct kvc_counts {
    uint64_t tokens;        /* rows that entered layer 0 */
    double linear_flops;    /* 2 * rows * in * out of every matrix product with weights, kvc_mix
                               and kvc_nearest among them */
    double attention_flops; /* 4 * head_dim * n_heads * visible (query, key) pairs */
} kvc_counts;
kvc_counts kvc_workspace_counts(const kvc_workspace *ws);

typedef enum kvc_output {
    KVC_OUT_NONE = 0, /* only K, V (and mass): the last layer stops where these are known */
    KVC_OUT_HIDDEN, /* float   [n_out, dim]: states leaving layer_end - 1, before the final norm */
    KVC_OUT_NORMED, /* float   [n_out, dim]: the same of the last layer, after the final norm */
    KVC_OUT_LOGITS, /* float   [n_out, vocab_size] */
    KVC_OUT_ARGMAX, /* int32_t [n_out]: best id, ties to the lowest */
    KVC_OUT_LOGPROB /* float   [n_out]: log-probability of targets */
} kvc_output;

typedef struct kvc_row {
    kvc_session *session;   /* a session stands in a batch once */
    const int32_t *tokens;  /* [n], or NULL when hidden is given */
    const float *hidden;    /* [n, dim] states entering layer_begin, or NULL */
    size_t n;               /* at least 1 */
    const int32_t *slack;   /* [n_layers] own key j is visible to own query i when j <= i + slack;
                               NULL: causal */
    const int32_t *outputs; /* [n_outputs] rows to return, ascending, each in 0 .. n - 1 */
    const int32_t *targets; /* [n_outputs] ids for KVC_OUT_LOGPROB, else NULL */
    size_t n_outputs;
} kvc_row;

typedef struct kvc_mass {
    double *mass;   /* [n_rows, n_layers, n_heads] attention that the row's queries pay to given
                        keys, mean over its n queries; layers outside the call's range: 0 */
    size_t skip;    /* keys left out at the start of a layer's given keys */
    bool published; /* the published code's softmax: +1 on visible columns, nothing hidden */
} kvc_mass;

typedef struct kvc_batch {
    const kvc_row *rows;
    size_t n_rows;
    int layer_begin;
    int layer_end; /* one past the last layer that runs */
    kvc_output output;
    void *out;            /* [sum of n_outputs, ...] in the order of rows; NULL for NONE */
    const kvc_mass *mass; /* or NULL */
} kvc_batch;

/* Runs a batch. A row's bits depend on its own session and tokens only: not on the other rows,
 * not on the number of threads. On any error every session is as it was before. */
kvc_status kvc_forward(kvc_workspace *ws, const kvc_batch *batch, kvc_error *err);

/* ---- tokens as vectors ----------------------------------------------------------------- */

/* out [n, dim]: what enters layer 0 for these ids [n]. */
kvc_status kvc_embed(kvc_workspace *ws, float *out, const int32_t *ids, size_t n, kvc_error *err);
/* out [n, dim]: the same for no one token: the mean of the embedding table, weighted with
 * softmax(logits / temperature). logits: [n, vocab_size]. */
kvc_status kvc_mix(kvc_workspace *ws, float *out, const float *logits, size_t n, double temperature,
                   kvc_error *err);
/* ids [n]: the row of the embedding table nearest to vectors [n, dim] by cosine, ties to the
 * lowest id. */
kvc_status kvc_nearest(kvc_workspace *ws, int32_t *ids, const float *vectors, size_t n,
                       kvc_error *err);

/* ---- choosing layers and tokens -------------------------------------------------------- */

typedef enum kvc_preset { KVC_PAPER = 0, KVC_REFERENCE } kvc_preset;

/* Layer scores from the attention mass [n]: alpha * minmax(mass) + (1 - alpha) * gaussian(mu,
 * sigma), float32. KVC_REFERENCE min-max normalises the gaussian too. mu: NaN for the preset's. */
kvc_status kvc_score(float *scores, const double *mass, int n, double alpha, double mu,
                     double sigma, kvc_preset preset, kvc_error *err);
/* Layer indices, best first. Ties: the lower index first in KVC_PAPER, the higher in
 * KVC_REFERENCE. */
void kvc_rank(int32_t *order, const float *scores, int n, kvc_preset preset);

typedef struct kvc_sampler {
    double temperature; /* 0: greedy */
    int top_k;          /* 0: all */
    double top_p;       /* 1: all */
    uint64_t state[4];  /* of the generator; kvc_sampler_seed fills it */
} kvc_sampler;

void kvc_sampler_seed(kvc_sampler *sampler, uint64_t seed);
/* Draws one id from logits [n]. Ties go to the lowest id; at least one candidate stays. */
kvc_status kvc_sample(int32_t *id, kvc_sampler *sampler, const float *logits, size_t n,
                      kvc_error *err);

#ifdef __cplusplus
}
#endif

#endif
