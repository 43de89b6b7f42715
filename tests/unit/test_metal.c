/*
 * The Metal backend: the kernel suite with the kernels it chooses and with the plain ones alone,
 * then the built-in model. On a Mac on its GPU; elsewhere on the stand-ins of tests/metal, under
 * every order of scheduling that they have.
 *
 *     test_metal [kernels|plain|shapes|passes|greedy]
 */
#include "backend/metal/metal.h"
#include "base/dtype.h"
#include "gpt2/session.h"

#include "kernel_suite.h"
#include "variants.h"

#ifdef BML_METAL_STANDIN
#include "simulator.h"
#else /* a GPU has an order of its own */
enum { METAL_N_ORDERS = 1 };

static void metal_set_order(int order, uint64_t seed)
{
    (void)order, (void)seed;
}

static void metal_watch(bool accesses)
{
    (void)accesses;
}
#endif

#define MODEL PROJECT_SOURCE "/models/storyteller"

/* ---- kernels ----------------------------------------------------------------------------------*/

static bml_status plain_queue_new(bml_device *device, int n_threads, bml_queue **queue,
                                  bml_error *err)
{
    bml_status status = bml_metal_queue_new(device, n_threads, queue, err);
    if (!status)
        (*queue)->plain = true;
    return status;
}

static int run_kernels(bool plain)
{
    bml_backend backend = *bml_backend_metal();
    int failed = 0;
    if (plain)
        backend.queue_new = plain_queue_new;
    for (int order = 0; order < METAL_N_ORDERS; order++) {
        char title[64];
        snprintf(title, sizeof title, "%s metal kernels, order %d", plain ? "plain" : "chosen",
                 order);
        metal_set_order(order, (uint64_t)order);
        failed += run_kernel_suite(&(kernel_suite){.title = title,
                                                   .backend = &backend,
                                                   .seed = (uint64_t)(order * 2 + plain),
                                                   .packer = bml_backend_cpu()});
    }
    return failed;
}

/* ---- shapes that the suite does not reach, against the plain kernels --------------------------*/

typedef struct gpu {
    bml_device *device;
    bml_queue *queue;
} gpu;

static gpu open_gpu(void)
{
    bml_error err;
    gpu g;
    expect_ok(bml_backend_metal()->open(&g.device, &err), &err);
    expect_ok(bml_backend_metal()->queue_new(g.device, 0, &g.queue, &err), &err);
    return g;
}

static void close_gpu(gpu *g)
{
    bml_backend_metal()->queue_free(g->queue);
    bml_backend_metal()->close(g->device);
}

/* N elements of DTYPE, or NaN throughout with a SCALE of 0. */
static bml_buffer random_buffer(const gpu *g, size_t n, bml_dtype dtype, float scale)
{
    static uint64_t seed = 1;
    bml_error err;
    bml_buffer buffer;
    expect_ok(bml_metal_buffer_new(g->device, n * bml_dtype_size(dtype), &buffer, &err), &err);
    memset(buffer.data, 0xff, buffer.bytes);
    for (size_t i = 0; scale != 0 && i < n; i++) {
        float x = scale * ((float)(test_random(&seed) >> 40) / (float)(1 << 23) - 1);
        if (dtype == BML_F32)
            ((float *)buffer.data)[i] = x;
        else
            ((uint16_t *)buffer.data)[i] =
                dtype == BML_F16 ? bml_f32_to_f16(x) : bml_f32_to_bf16(x);
    }
    return buffer;
}

/* Runs of queries in two slots, which find keys there already: heads of every size. */
static void test_prompts_attend(void **state)
{
    (void)state;
    enum { SLOTS = 2, CTX = 60, HEADS = 2, N = 22, MOST = 200 };
    static const int head_dims[] = {1, 2, 3, 4, 7, 8, 12, 33, 64, 65, 100, 127, 128, 129, MOST};
    gpu g = open_gpu();
    bml_error err;
    int32_t zeros[N] = {0}, position[N], slot[N];
    for (int t = 0; t < N; t++) {
        slot[t] = t < 15;
        position[t] = t < 15 ? 31 + t : t - 15;
    }
    bml_batch batch = {.n_tokens = N, .token = zeros, .position = position, .slot = slot};
    for (size_t i = 0; i < sizeof head_dims / sizeof *head_dims; i++) {
        size_t d = (size_t)head_dims[i], n = N * HEADS * d, cells = SLOTS * HEADS * CTX * d;
        bml_dtype dtype = (bml_dtype)(i % 3);
        bml_buffer q = random_buffer(&g, n, BML_F32, 2), out[2];
        bml_buffer k = random_buffer(&g, cells, dtype, 2), v = random_buffer(&g, cells, dtype, 2);
        bml_kv_cache cache = {dtype, 1, SLOTS, CTX, HEADS, (int)d, &k, &v};
        metal_set_order((int)i % METAL_N_ORDERS, i);
        for (int plain = 0; plain < 2; plain++) {
            out[plain] = random_buffer(&g, n, BML_F32, 0);
            g.queue->plain = plain;
            expect_ok(bml_metal_begin(g.queue, &batch, &err), &err);
            bml_metal_attention_cached(g.queue, &out[plain], &q, &cache, 0, 0.3f);
            expect_ok(bml_metal_end(g.queue, &err), &err);
        }
        expect_near("a prompt's attention", out[0].data, out[1].data, n, 1e-5, 1);
        bml_buffer *all[] = {&q, &k, &v, &out[0], &out[1]};
        for (size_t b = 0; b < sizeof all / sizeof *all; b++)
            bml_metal_buffer_free(g.device, all[b]);
    }
    close_gpu(&g);
}

/* Around the most inputs that threadgroup memory can hold. */
static void test_many_inputs(void **state)
{
    (void)state;
    static const int n_ins[] = {7872, 7873, 7876, 7936, 8000};
    enum { OUT = 36 };
    gpu g = open_gpu();
    bml_error err;
    for (size_t i = 0; i < sizeof n_ins / sizeof *n_ins; i++)
        for (int format = BML_WEIGHTS_F32; format <= BML_WEIGHTS_Q4; format++) {
            size_t n_in = (size_t)n_ins[i];
            bool out_in = (i + (size_t)format) % 2;
            bml_buffer held = random_buffer(&g, n_in * OUT, BML_F32, 1), none = {0}, out[2];
            bml_buffer x = random_buffer(&g, n_in, BML_F32, 1);
            bml_matrix matrix = {.data = held.data,
                                 .dtype = BML_F32,
                                 .rows = out_in ? OUT : (int)n_in,
                                 .cols = out_in ? (int)n_in : OUT};
            bml_weight w;
            bml_batch batch = {0};
            expect_ok(bml_metal_weight_new(g.device, &matrix, out_in, (bml_weight_format)format, &w,
                                           &err),
                      &err);
            for (int plain = 0; plain < 2; plain++) {
                out[plain] = random_buffer(&g, OUT, BML_F32, 0);
                g.queue->plain = plain;
                expect_ok(bml_metal_begin(g.queue, &batch, &err), &err);
                bml_metal_linear(g.queue, &out[plain], &x, &w, &none, 1);
                expect_ok(bml_metal_end(g.queue, &err), &err);
            }
            expect_near("many inputs", out[0].data, out[1].data, OUT, 1e-6, (double)n_in / 4);
            bml_metal_weight_free(g.device, &w);
            bml_buffer *all[] = {&held, &x, &out[0], &out[1]};
            for (size_t b = 0; b < sizeof all / sizeof *all; b++)
                bml_metal_buffer_free(g.device, all[b]);
        }
    close_gpu(&g);
}

/* ---- whole passes -----------------------------------------------------------------------------*/

enum { VOCAB = 8192, LONGEST = 100 };

static bml_model *load(const char *name, bml_backend_kind backend, bml_weight_format format)
{
    bml_error err;
    bml_model *model;
    bml_model_options options = {.backend = backend, .weights = format};
    expect_ok(bml_model_load(name, &options, &model, &err), &err);
    return model;
}

static bml_session *session_of(const bml_model *model, bml_session_options options)
{
    bml_error err;
    bml_session *session;
    expect_ok(bml_session_new(model, &options, &session, &err), &err);
    return session;
}

static void random_ids(int32_t *ids, size_t n, uint64_t seed)
{
    for (size_t i = 0; i < n; i++)
        ids[i] = (int32_t)(test_random(&seed) % VOCAB);
}

/*
 * The formats of weights, in pieces: a few tokens, one, many. Row-major ones against the CPU; Q8
 * and Q4, for which the CPU rounds activations, against the plain kernels.
 */
static void test_logits(void **state)
{
    (void)state;
    enum { MOST = 16 };
    static const struct {
        bml_weight_format format;
        bml_dtype kv;
        size_t pieces[3];
        double tolerance; /* a cache of 16 bits may round a value the other way */
    } cases[] = {{BML_WEIGHTS_BF16, BML_F32, {3, 1, 12}, 1e-4},
                 {BML_WEIGHTS_F32, BML_F32, {9, 1, 2}, 1e-4},
                 {BML_WEIGHTS_F16, BML_F16, {1, 1, 2}, 2e-2},
                 {BML_WEIGHTS_Q8, BML_F32, {1, 3, 1}, 1e-4},
                 {BML_WEIGHTS_Q4, BML_F32, {2, 1, 1}, 1e-4}};
    static float wanted[MOST * VOCAB], got[MOST * VOCAB];
    int32_t ids[MOST];
    random_ids(ids, MOST, 3);
    for (size_t c = 0; c < sizeof cases / sizeof *cases; c++) {
        size_t n = cases[c].pieces[0] + cases[c].pieces[1] + cases[c].pieces[2];
        bml_session_options options = {.kv_dtype = cases[c].kv, .n_ctx = MOST};
        bool packed = cases[c].format >= BML_WEIGHTS_Q8;
        bml_model *metal = load(MODEL, BML_BACKEND_METAL, cases[c].format);
        bml_model *other = packed ? metal : load(MODEL, BML_BACKEND_CPU, cases[c].format);
        bml_session *a = session_of(metal, options), *b = session_of(other, options);
        assert_string_equal(bml_model_get_info(metal)->backend, "metal");
        if (packed)
            b->queue->plain = b->kernel_by_kernel = true;
        metal_set_order((int)c % METAL_N_ORDERS, c);
        metal_watch(c == 0); /* the others touch memory in the same ways, or in the suite's */
        eval_all(b, 0, ids, n, wanted);
        for (size_t i = 0, at = 0; i < 3; at += cases[c].pieces[i++])
            eval_all(a, 0, ids + at, cases[c].pieces[i], got + at * VOCAB);
        expect_near("logits", got, wanted, n * VOCAB, cases[c].tolerance, 1);
        bml_session_free(a);
        bml_session_free(b);
        if (!packed)
            bml_model_free(other);
        bml_model_free(metal);
    }
    metal_watch(true);
}

/* The prompt of a variant whole and in pieces, and its greedy continuation, against transformers.
 */
static void check_variant(const variant *v, bool odd)
{
    size_t pieces[] = {64, odd ? 7 : 1};
    loaded l = variant_load(v, BML_BACKEND_METAL);
    size_t vocab = (size_t)l.info->vocab_size;
    float *logits = malloc(l.n_logits * sizeof *logits);
    assert_non_null(logits);
    bml_session *session = session_of(l.model, (bml_session_options){0});
    for (size_t p = 0; p < sizeof pieces / sizeof *pieces; p++) {
        bml_error err;
        expect_ok(bml_session_truncate(session, 0, 0, &err), &err);
        for (size_t i = 0; i < l.n_prompt; i += pieces[p]) {
            size_t n = l.n_prompt - i < pieces[p] ? l.n_prompt - i : pieces[p];
            eval_all(session, 0, l.prompt + i, n, logits + i * vocab);
        }
        expect_logits(v->name, logits, l.logits, l.n_logits);
    }
    expect_greedy(v->name, session, l.prompt, l.n_prompt, l.greedy, l.n_greedy);
    bml_session_free(session);
    free(logits);
    variant_free(&l);
}

/* The fused pass is the kernels one by one, to the bit: one token, tokens of one slot, of several,
 * and both at once; products and attention then take each of their forms. */
static void check_fused(const variant *v, bml_weight_format format, bml_dtype kv)
{
    enum { SLOTS = 3 };
    static const int batches[][SLOTS] = {{1, 0, 0}, {9, 0, 0}, {1, 1, 1}, {3, 1, 5}, {0, 2, 0}};
    static float fused[LONGEST * 320], single[LONGEST * 320];
    bml_error err;
    bml_model *model = load(v->directory, BML_BACKEND_METAL, format);
    size_t vocab = (size_t)bml_model_get_info(model)->vocab_size;
    bml_session_options options = {.n_slots = SLOTS, .kv_dtype = kv};
    bml_session *a = session_of(model, options), *b = session_of(model, options);
    uint64_t seed = 5;
    b->kernel_by_kernel = true;
    assert_true(vocab <= 320);
    for (size_t i = 0; i < sizeof batches / sizeof *batches; i++) {
        bml_batch_token batch[LONGEST];
        int32_t best[2][LONGEST];
        size_t n = random_batch(batch, batches[i], SLOTS, vocab, &seed);
        expect_ok(bml_session_eval(a, batch, n, fused, &err), &err);
        expect_ok(bml_session_eval(b, batch, n, single, &err), &err);
        assert_memory_equal(fused, single, n * vocab * sizeof *fused);
        expect_ok(bml_session_eval_argmax(a, batch, 1, best[0], &err), &err);
        expect_ok(bml_session_eval_argmax(b, batch, 1, best[1], &err), &err);
        assert_int_equal(best[0][0], best[1][0]);
    }
    bml_session_free(a);
    bml_session_free(b);
    bml_model_free(model);
}

static void test_variants(void **state)
{
    (void)state;
    static variant variants[MAX_VARIANTS];
    size_t n = find_variants(variants);
    assert_true(n >= MIN_VARIANTS);
    for (size_t i = 0; i < n; i++) {
        metal_set_order((int)i % METAL_N_ORDERS, i);
        check_variant(&variants[i], i % 2);
        check_fused(&variants[i], BML_WEIGHTS_FILE, (bml_dtype)(i % 3));
        check_fused(&variants[i], i % 2 ? BML_WEIGHTS_Q8 : BML_WEIGHTS_Q4, BML_F32);
    }
}

/* Slots of different lengths in one pass, their tokens in turn or one slot after the other, against
 * each alone; chunks smaller than the prompt. */
static void test_slots_and_chunks(void **state)
{
    (void)state;
    enum { SLOTS = 4, MOST = 33 };
    static const int lengths[SLOTS] = {1, MOST, 8, 18};
    static float together[LONGEST * 320], alone[LONGEST * 320];
    bml_error err;
    bml_model *model = load(TEST_DATA "/variants/heads-of-64", BML_BACKEND_METAL, BML_WEIGHTS_FILE);
    size_t vocab = (size_t)bml_model_get_info(model)->vocab_size;
    assert_true(vocab <= 320);
    for (int in_turn = 0; in_turn < 2; in_turn++) {
        bml_session *s = session_of(model, (bml_session_options){.n_slots = SLOTS, .chunk = 17});
        bml_session *one = session_of(model, (bml_session_options){0});
        bml_batch_token batch[LONGEST];
        int32_t ids[SLOTS][MOST];
        size_t n = 0;
        for (int i = 0; i < SLOTS * MOST; i++) {
            int slot = in_turn ? i % SLOTS : i / MOST, t = in_turn ? i / SLOTS : i % MOST;
            ids[slot][t] = (int32_t)((size_t)(i * 7 + slot) % vocab);
            if (t < lengths[slot])
                batch[n++] = (bml_batch_token){ids[slot][t], slot, true};
        }
        expect_ok(bml_session_eval(s, batch, n, together, &err), &err);
        for (int slot = 0; slot < SLOTS; slot++) {
            size_t m = 0;
            expect_ok(bml_session_truncate(one, 0, 0, &err), &err);
            eval_all(one, 0, ids[slot], (size_t)lengths[slot], alone);
            for (size_t i = 0; i < n; i++)
                if (batch[i].slot == slot)
                    expect_logits("a slot beside others", together + i * vocab, alone + m++ * vocab,
                                  vocab);
            assert_int_equal(m, lengths[slot]);
        }
        bml_session_free(s);
        bml_session_free(one);
    }
    bml_model_free(model);
}

/* ---- greedy text against transformers; each access has been watched often enough -------------*/

enum { STEPS = 64 };

static int watch_no_more(void **state)
{
    (void)state;
    metal_watch(false);
    return 0;
}

static void test_greedy(void **state)
{
    (void)state;
    json_t *reference = golden_json(MODEL "/reference.json");
    const json_t *cases = golden_member(reference, "cases");
    bml_model *model = load(MODEL, BML_BACKEND_METAL, BML_WEIGHTS_FILE);
    bml_session *session = session_of(model, (bml_session_options){.n_ctx = LONGEST});
    assert_int_equal(json_array_size(cases), 4);
    for (size_t c = 0; c < json_array_size(cases); c++) {
        const json_t *one = json_array_get(cases, c);
        size_t n, n_greedy;
        int32_t *ids = golden_ids(one, "ids", &n), *greedy = golden_ids(one, "greedy", &n_greedy);
        assert_true(n_greedy >= STEPS);
        metal_set_order((int)c % METAL_N_ORDERS, c);
        expect_greedy(json_string_value(golden_member(one, "prompt")), session, ids, n, greedy,
                      STEPS);
        free(ids);
        free(greedy);
    }
    bml_session_free(session);
    bml_model_free(model);
    json_decref(reference);
}

/* All prompts side by side: one pass over the weights for a token of each. */
static void test_greedy_beside_others(void **state)
{
    (void)state;
    enum { SLOTS = 4, FEWER = 16 };
    json_t *reference = golden_json(MODEL "/reference.json");
    const json_t *cases = golden_member(reference, "cases");
    bml_model *model = load(MODEL, BML_BACKEND_METAL, BML_WEIGHTS_FILE);
    bml_session *session =
        session_of(model, (bml_session_options){.n_slots = SLOTS, .n_ctx = LONGEST});
    bml_batch_token batch[LONGEST];
    int32_t *greedy[SLOTS], next[SLOTS];
    size_t n = 0, n_ids;
    bml_error err;
    for (int slot = 0; slot < SLOTS; slot++) {
        const json_t *one = json_array_get(cases, (size_t)slot);
        int32_t *ids = golden_ids(one, "ids", &n_ids);
        for (size_t i = 0; i < n_ids; i++)
            batch[n++] = (bml_batch_token){ids[i], slot, i + 1 == n_ids};
        free(ids);
        greedy[slot] = golden_ids(one, "greedy", &n_ids);
    }
    for (int step = 0; step < FEWER; step++, n = SLOTS) {
        metal_set_order(step % METAL_N_ORDERS, (uint64_t)step);
        expect_ok(bml_session_eval_argmax(session, batch, n, next, &err), &err);
        for (int slot = 0; slot < SLOTS; slot++) {
            assert_int_equal(next[slot], greedy[slot][step]);
            batch[slot] = (bml_batch_token){next[slot], slot, true};
        }
    }
    for (int slot = 0; slot < SLOTS; slot++)
        free(greedy[slot]);
    bml_session_free(session);
    bml_model_free(model);
    json_decref(reference);
}

int main(int argc, char **argv)
{
    static const struct CMUnitTest shapes[] = {
        cmocka_unit_test(test_prompts_attend),
        cmocka_unit_test(test_many_inputs),
    };
    static const struct CMUnitTest passes[] = {
        cmocka_unit_test(test_logits),
        cmocka_unit_test(test_variants),
        cmocka_unit_test(test_slots_and_chunks),
    };
    static const struct CMUnitTest greedy[] = {
        cmocka_unit_test(test_greedy),
        cmocka_unit_test(test_greedy_beside_others),
    };
    const char *only = argc > 1 ? argv[1] : NULL;
    int failed = 0;
    if (!only || strcmp(only, "kernels") == 0)
        failed += run_kernels(false);
    if (!only || strcmp(only, "plain") == 0)
        failed += run_kernels(true);
    if (!only || strcmp(only, "shapes") == 0)
        failed += cmocka_run_group_tests_name("metal shapes", shapes, NULL, NULL);
    if (!only || strcmp(only, "passes") == 0)
        failed += cmocka_run_group_tests_name("metal passes", passes, NULL, NULL);
    if (!only || strcmp(only, "greedy") == 0)
        failed += cmocka_run_group_tests_name("metal greedy", greedy, watch_no_more, NULL);
    return failed;
}
