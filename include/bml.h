/*
 * bml.h: the public interface of bare-metal-llm, GPT-2 inference from scratch.
 *
 * Conventions
 *   - Every fallible call returns a bml_status and fills the bml_error it is given (which may be
 *     NULL). On failure no output argument is written unless its comment says so.
 *   - The library never exits, aborts, prints or keeps global state. Out of memory is an error
 *     like any other (BML_ERR_MEMORY).
 *   - Text is UTF-8 with an explicit length in bytes; it may hold NUL and invalid UTF-8.
 *   - Token ids are int32_t, logits float32, both in the host's byte order.
 *   - A bml_model and a bml_tokenizer never change after loading: any number of threads may use
 *     them. A bml_session belongs to one thread at a time; distinct sessions may run in distinct
 *     threads.
 *   - Handles are freed by their own _free function, which accepts NULL. Everything else the
 *     library hands out is freed by bml_free, unless its comment says who owns it.
 */
#ifndef BML_H
#define BML_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#if defined(__GNUC__)
#define BML_API __attribute__((visibility("default")))
#else
#define BML_API
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* ---- status and errors ----------------------------------------------------------------------*/

typedef enum bml_status {
    BML_OK = 0,
    BML_ERR_ARGUMENT,    /* the caller passed something out of its documented range */
    BML_ERR_IO,          /* a file is missing, unreadable or cannot be written */
    BML_ERR_FORMAT,      /* a file is damaged or contradicts its format */
    BML_ERR_UNSUPPORTED, /* a valid file or request that this build cannot run */
    BML_ERR_MEMORY,      /* out of memory */
    BML_ERR_CONTEXT,     /* more tokens than the context holds */
    BML_ERR_NUMERIC,     /* the model produced NaN or infinity */
    BML_ERR_STOPPED,     /* the caller's callback asked to stop */
    BML_ERR_DEVICE       /* the backend's device failed */
} bml_status;

typedef struct bml_error {
    bml_status code;
    char message[1024]; /* one line: what was wrong, where, and what would be right */
} bml_error;

/* "0.1.0" */
BML_API const char *bml_version(void);

/* Frees memory that the library handed out. NULL is fine. */
BML_API void bml_free(void *memory);

/* ---- models ---------------------------------------------------------------------------------*/

typedef struct bml_model bml_model;
typedef struct bml_tokenizer bml_tokenizer;
typedef struct bml_session bml_session;

typedef enum bml_dtype { BML_F32, BML_F16, BML_BF16, BML_F64 } bml_dtype;

/* AUTO is the first of metal, cuda and cpu that this build has and that can hold the model. */
typedef enum bml_backend_kind {
    BML_BACKEND_AUTO,
    BML_BACKEND_CPU,
    BML_BACKEND_CUDA,
    BML_BACKEND_METAL
} bml_backend_kind;

/*
 * How weight matrices are held in memory. BML_WEIGHTS_FILE keeps what the file holds and maps it;
 * the others convert on loading where the file differs. Q8 and Q4 hold about 8 and 4 bits a weight,
 * with embeddings and head at 8 in both.
 */
typedef enum bml_weight_format {
    BML_WEIGHTS_FILE,
    BML_WEIGHTS_F32,
    BML_WEIGHTS_BF16,
    BML_WEIGHTS_F16,
    BML_WEIGHTS_Q8,
    BML_WEIGHTS_Q4
} bml_weight_format;

typedef struct bml_model_options {
    bml_backend_kind backend;
    bml_weight_format weights;
} bml_model_options;

/* The hyperparameters of a loaded model, named as in Hugging Face's config.json. */
typedef struct bml_model_info {
    int n_layer, n_head, n_embd, n_inner, n_positions;
    int vocab_size;   /* rows of the embedding, so the width of a row of logits */
    int n_tokens;     /* ids that the tokenizer knows; ids from here to vocab_size are padding */
    int eos_token_id; /* -1 if the model has none; of several that end a text, the first */
    int bos_token_id; /* -1 if the model has none */
    uint64_t n_params;
    uint64_t file_bytes;     /* bytes of the tensors used, as stored */
    uint64_t resident_bytes; /* bytes of the weights as the backend holds them, mapped or not */
    uint64_t step_bytes;     /* weight bytes that one decode step must read */
    double load_ms;          /* wall time of bml_model_load */
    const char *name;        /* what was asked for, or "storyteller"; owned by the model */
    const char *path;        /* the directory or file it was loaded from; owned by the model */
    const char *backend;     /* "cpu", "cuda" or "metal" */
    const char
        *weight_format; /* "f32", "bf16", "f16", "q8", "q4"; "mixed" where a file mixes dtypes */
    bml_dtype kv_dtype; /* the cache that suits the weights on this backend: of 16 bits where that
                           is many times as fast and they have no more, else float32 */
} bml_model_info;

/*
 * Finds the directory or file that NAME stands for: a directory, a .safetensors file, a Hub id
 * ("openai-community/gpt2", "gpt2") in the local Hugging Face cache, or NULL for the built-in
 * model. *path is a new string, freed by bml_free.
 */
BML_API bml_status bml_model_find(const char *name, char **path, bml_error *err);

/* Loads config, weights and tokenizer. NAME as for bml_model_find; OPTIONS may be NULL. */
BML_API bml_status bml_model_load(const char *name, const bml_model_options *options,
                                  bml_model **model, bml_error *err);
BML_API void bml_model_free(bml_model *model);

/* Valid as long as the model. */
BML_API const bml_model_info *bml_model_get_info(const bml_model *model);

/* The model's tokenizer, owned by the model; NULL if its directory holds none. */
BML_API const bml_tokenizer *bml_model_get_tokenizer(const bml_model *model);

/*
 * What a checkpoint holds, without loading it: one JSON object with "path", "config", "tensors"
 * (name, dtype, shape, bytes, and "use" or "ignored" with the reason), "tokenizer" and totals.
 * *json is NUL-terminated, freed by bml_free.
 */
BML_API bml_status bml_inspect(const char *name, char **json, bml_error *err);

/*
 * Writes a random checkpoint of true GPT-2 shape in Hugging Face's format (config.json,
 * model.safetensors) into the directory OUT, which is made if it is missing. PRESET is "gpt2",
 * "gpt2-medium", "gpt2-large", "gpt2-xl" or "tiny". DTYPE is F32, F16 or BF16. The same seed gives
 * the same bytes on every machine. PROGRESS may be NULL; it gets bytes written and bytes in all,
 * and returns false to stop.
 */
BML_API bml_status bml_synth(const char *preset, uint64_t seed, bml_dtype dtype, const char *out,
                             bool (*progress)(void *context, uint64_t done, uint64_t total),
                             void *context, bml_error *err);

/* ---- tokenizer ------------------------------------------------------------------------------*/

/* Loads the tokenizer of a model without its weights. NAME as for bml_model_find. */
BML_API bml_status bml_tokenizer_load(const char *name, bml_tokenizer **tokenizer, bml_error *err);
BML_API void bml_tokenizer_free(bml_tokenizer *tokenizer);

/* The number of ids: one more than the largest. */
BML_API int bml_tokenizer_size(const bml_tokenizer *tokenizer);

/*
 * Text to ids. Any bytes are fine: invalid UTF-8 goes through byte by byte. With PARSE_SPECIAL,
 * special tokens such as "<|endoftext|>" in the text become their ids; without it they are plain
 * text. (Added tokens that are not special are always recognised, as in Hugging Face's library.)
 * *ids is new memory of *n_ids entries, freed by bml_free; it is not NULL even for no ids.
 */
BML_API bml_status bml_tokenize(const bml_tokenizer *tokenizer, const char *text, size_t length,
                                bool parse_special, int32_t **ids, size_t *n_ids, bml_error *err);

/*
 * Ids to bytes, verbatim, special tokens included as their text. *text is NUL-terminated new
 * memory of *length bytes (the NUL not counted), freed by bml_free.
 */
BML_API bml_status bml_detokenize(const bml_tokenizer *tokenizer, const int32_t *ids, size_t n_ids,
                                  char **text, size_t *length, bml_error *err);

/*
 * The bytes of one token (which may be part of a character), owned by the tokenizer. NULL for an
 * id that the tokenizer does not have.
 */
BML_API const char *bml_token_bytes(const bml_tokenizer *tokenizer, int32_t id, size_t *length);

/* ---- sessions -------------------------------------------------------------------------------*/

typedef struct bml_session_options {
    int n_slots;        /* independent sequences; 0 means 1 */
    int n_ctx;          /* tokens each slot can hold; 0 means n_positions, more is an error */
    bml_dtype kv_dtype; /* F32 (0), F16 or BF16; bml_model_info says which suits the weights */
    int n_threads;      /* 0: as many as the cgroup and the affinity mask allow */
    int chunk;          /* most tokens in one pass over the weights; 0: chosen by the library */
} bml_session_options;

/* OPTIONS may be NULL. The model must outlive the session. */
BML_API bml_status bml_session_new(const bml_model *model, const bml_session_options *options,
                                   bml_session **session, bml_error *err);
BML_API void bml_session_free(bml_session *session);

/* The number of threads the session runs. */
BML_API int bml_session_threads(const bml_session *session);

/* Tokens now in a slot, and the most that it can hold. */
BML_API int bml_session_length(const bml_session *session, int slot);
BML_API int bml_session_capacity(const bml_session *session);

/* Forgets all but the first LENGTH tokens of a slot. */
BML_API bml_status bml_session_truncate(bml_session *session, int slot, int length, bml_error *err);

/* One token of a flat batch. Its position is the next free one of its slot, in batch order. */
typedef struct bml_batch_token {
    int32_t token;
    int32_t slot;
    bool want_logits;
} bml_batch_token;

/*
 * Runs N tokens through the model: prompts, decode steps of many slots and any mixture are the
 * same call. Checked first: ids, slots and room; on BML_ERR_CONTEXT nothing has run. LOGITS
 * receives the rows of the tokens that want them, in batch order, float32 [rows, vocab_size]; it
 * belongs to the caller and may be NULL if no token wants any. On the CPU a row's bits do not
 * depend on the other tokens in the batch, on the chunk size or on the number of threads. On a
 * later failure (BML_ERR_NUMERIC, BML_ERR_DEVICE) the slots keep the lengths they had before the
 * call.
 */
BML_API bml_status bml_session_eval(bml_session *session, const bml_batch_token *batch, size_t n,
                                    float *logits, bml_error *err);

/*
 * As bml_session_eval for one decode step a slot, choosing the most probable token on the device:
 * NEXT[i] is the argmax over the ids that the tokenizer knows (the lowest id on ties) for the i-th
 * batch token that wants logits.
 */
BML_API bml_status bml_session_eval_argmax(bml_session *session, const bml_batch_token *batch,
                                           size_t n, int32_t *next, bml_error *err);

/* ---- sampling -------------------------------------------------------------------------------*/

/* Semantics and order as in transformers: penalty, temperature, top-k, top-p, min-p. */
typedef struct bml_sampling {
    float temperature;        /* 0: greedy, the most probable token */
    int top_k;                /* keep the k most probable; 0 or less, or >= vocabulary: all */
    float top_p;              /* keep the smallest set whose probability reaches p; 1: all */
    float min_p;              /* drop what is below min_p times the best probability; 0: none */
    float repetition_penalty; /* divides positive and multiplies negative logits of each distinct
                                 token so far, prompt included; 1: none */
    uint64_t seed;            /* the same seed gives the same text, alone or beside others */
} bml_sampling;

/* temperature 1, everything else off */
BML_API bml_sampling bml_sampling_default(void);

/*
 * Picks the next token from LOGITS, float32 [vocab_size], of which the first N_TOKENS may be
 * chosen. HISTORY holds the tokens so far, for the penalty. STEP counts the tokens generated, and
 * with the seed keys the generator.
 */
BML_API bml_status bml_sample(const bml_sampling *sampling, const float *logits, int n_tokens,
                              const int32_t *history, size_t n_history, uint64_t step,
                              int32_t *token, bml_error *err);

/*
 * As bml_session_eval for one decode step a slot, drawing each row's token where its logits are: as
 * bml_sample would with SAMPLING[i] and STEP[i], for the i-th batch token that wants logits; both
 * arrays have an element for each. There is no history, so repetition_penalty must be 1. A GPU has
 * fewer digits of a probability than the CPU, so that a few draws in a hundred thousand fall to
 * another token, or up to one in a thousand where many tokens are about equally probable.
 */
BML_API bml_status bml_session_eval_sample(bml_session *session, const bml_batch_token *batch,
                                           size_t n, const bml_sampling *sampling,
                                           const uint64_t *step, int32_t *next, bml_error *err);

/* ---- generating text ------------------------------------------------------------------------*/

typedef struct bml_generate_options {
    bml_sampling sampling;
    int max_tokens;          /* most tokens to generate; < 0: until the context is full */
    bool ignore_eos;         /* go on past the end-of-text token */
    const char *const *stop; /* strings that end the text and are not part of it; n_stop of them */
    size_t n_stop;
    /*
     * Receives text as soon as it is certain: whole characters, nothing that may turn out to be a
     * stop string. Return false to end with BML_ERR_STOPPED. May be NULL.
     */
    bool (*on_text)(void *context, const char *text, size_t length);
    void *context;
} bml_generate_options;

typedef enum bml_finish_reason { BML_FINISH_STOP, BML_FINISH_LENGTH } bml_finish_reason;

typedef struct bml_generation {
    int32_t *ids; /* the generated tokens, freed by bml_generation_clear; the end-of-text token that
                     ended them is not among them */
    size_t n_ids;
    char *text; /* their text, NUL-terminated, without the stop string */
    size_t text_length;
    bml_finish_reason finish_reason; /* stop: end of text or stop string; length: max_tokens or a
                                        full context */
    size_t prefill_tokens, decode_tokens;
    double prefill_ms, decode_ms; /* wall time of the prompt, and of all steps after it */
} bml_generation;

/*
 * Continues PROMPT (at least one token, at most the slot's capacity) in SLOT, which is emptied
 * first. *OUT is filled on success, and on BML_ERR_STOPPED with what there is so far.
 */
BML_API bml_status bml_generate(bml_session *session, int slot, const int32_t *prompt,
                                size_t n_prompt, const bml_generate_options *options,
                                bml_generation *out, bml_error *err);
BML_API void bml_generation_clear(bml_generation *generation);

/* ---- scoring text ---------------------------------------------------------------------------*/

typedef struct bml_token_score {
    double logprob; /* natural logarithm of the token's probability given what came before */
    double entropy; /* of the distribution the token was drawn from, in nats */
    int32_t rank;   /* 1 for the most probable token; ties count in id order */
    bool scored;    /* false for the first token of a window: nothing predicts it */
} bml_token_score;

/*
 * Scores IDS under sliding windows of the session's capacity that move by STRIDE tokens (0: the
 * capacity, windows side by side), as Hugging Face's recipe for perplexity does: each window scores
 * the tokens that no earlier one did, but not its own first token, which nothing in it predicts.
 * With a stride below the capacity that leaves out the very first token alone, and every other has
 * at least capacity - stride tokens before it wherever there are that many. SCORES has n_ids
 * entries. PROGRESS may be NULL; it gets tokens done and returns false to stop (BML_ERR_STOPPED).
 */
BML_API bml_status bml_score(bml_session *session, const int32_t *ids, size_t n_ids, int stride,
                             bml_token_score *scores,
                             bool (*progress)(void *context, size_t done, size_t total),
                             void *context, bml_error *err);

/* ---- what the machine can do ----------------------------------------------------------------*/

typedef struct bml_limits {
    double read_bytes_per_s; /* measured: streaming reads of memory far larger than the caches */
    double flops_per_s;      /* measured: float32 multiply-adds, two operations each */
    double int8_ops_per_s; /* measured: dot products of 8-bit integers, two operations a product */
} bml_limits;

/* Measures this machine with the session's threads; takes about a second. */
BML_API bml_status bml_measure_limits(bml_session *session, bml_limits *limits, bml_error *err);

/* Seconds that a device other than the CPU has spent on the session's passes so far, by its own
 * clock; 0 where the backend does not say. */
BML_API double bml_session_device_seconds(const bml_session *session);

/* A kernel of a pass: its name ("linear", "softmax", ...), the layer or -1, and when it began and
 * ended, in seconds from a fixed point. */
typedef void bml_trace_fn(void *context, const char *kernel, int layer, double began, double ended);

/* From now on runs passes kernel by kernel, in place of the backend's fused one, and tells
 * ON_KERNEL about each; NULL ends that. */
BML_API void bml_session_trace(bml_session *session, bml_trace_fn *on_kernel, void *context);

#ifdef __cplusplus
}
#endif
#endif
