/*
 * The CUDA backend: the kernel suite, then whole passes against the CPU's and against its own
 * kernels one by one. Where no CUDA device can be used it is skipped, unless BML_REQUIRE_CUDA is
 * set.
 */
#include "cuda_tests.h"
#include "kernel_suite.h"
#include "random_model.h"
#include "variants.h"

#include <math.h>

enum { N = 150 };

bml_error failure;
bool few_tests;

void ok(bml_status status)
{
    if (status)
        fail_msg("%s", failure.message);
}

/* The built-in model, loaded when it is first asked for. */
static bml_model *built_in_models[2][BML_WEIGHTS_Q4 + 1];

static bml_model *built_in(bool on_gpu, int format)
{
    bml_model **model = &built_in_models[on_gpu][format];
    bml_model_options options = {on_gpu ? BML_BACKEND_CUDA : BML_BACKEND_CPU,
                                 (bml_weight_format)format};
    if (!*model)
        ok(bml_model_load(NULL, &options, model, &failure));
    return *model;
}

bml_model *cuda(int format)
{
    return built_in(true, format);
}

/* The same on the CPU. */
static bml_model *cpu(int format)
{
    return built_in(false, format);
}

static int free_models(void **state)
{
    (void)state;
    for (int i = 0; i < 2; i++)
        for (int format = 0; format <= BML_WEIGHTS_Q4; format++)
            bml_model_free(built_in_models[i][format]);
    return 0;
}

bml_session *session_on(const bml_model *model, bml_session_options options)
{
    bml_session *s;
    ok(bml_session_new(model, &options, &s, &failure));
    return s;
}

static void random_ids(int32_t *ids, size_t n, uint64_t seed)
{
    for (size_t i = 0; i < n; i++)
        ids[i] = (int32_t)(test_random(&seed) % VOCAB);
}

/* Appends N tokens to SLOT in pieces of PIECE; LOGITS gets every row. */
static void eval(bml_session *s, int slot, const int32_t *ids, size_t n, size_t piece,
                 float *logits)
{
    bml_batch_token batch[N];
    for (size_t at = 0; at < n; at += piece) {
        size_t now = piece < n - at ? piece : n - at;
        for (size_t i = 0; i < now; i++)
            batch[i] = (bml_batch_token){ids[at + i], slot, true};
        ok(bml_session_eval(s, batch, now, logits + at * VOCAB, &failure));
    }
}

/* The largest difference within a row of WIDTH against the largest logit, over all rows. */
static double distance(const float *got, const float *wanted, size_t n_rows, size_t width)
{
    double worst = 0;
    for (size_t r = 0; r < n_rows; r++) {
        double largest = 0, off = 0;
        for (size_t i = r * width; i < (r + 1) * width; i++) {
            largest = fmax(largest, fabs(wanted[i]));
            off = isfinite(got[i]) ? fmax(off, fabs((double)got[i] - wanted[i])) : INFINITY;
        }
        worst = fmax(worst, off / largest);
    }
    return worst;
}

/* What a pass may differ by from the CPU's kernels: in F32 by the order of sums alone; the 16-bit
 * formats also round activations; with Q8 and Q4 a last bit can move a whole step of an int8. */
static const double bounds[] = {[BML_WEIGHTS_F32] = 1e-4,
                                [BML_WEIGHTS_BF16] = 3e-2,
                                [BML_WEIGHTS_F16] = 4e-3,
                                [BML_WEIGHTS_Q8] = 5e-2,
                                [BML_WEIGHTS_Q4] = 5e-2};

static void test_logits(void **state)
{
    (void)state;
    static float wanted[N * VOCAB], got[N * VOCAB];
    static const bml_dtype kv[] = {BML_F32, BML_BF16, BML_F16};
    static const size_t pieces[] = {1, 2, 7, 64, N};
    int32_t ids[N];
    size_t n = few_tests ? 80 : N;
    random_ids(ids, n, 1);
    for (int format = BML_WEIGHTS_F32; format <= BML_WEIGHTS_Q4; format++)
        for (int k = few_tests; k < 3 - few_tests; k++) { /* few: BF16 */
            bml_session *c = session_on(cpu(format), (bml_session_options){.kv_dtype = kv[k]});
            eval(c, 0, ids, n, n, wanted);
            bml_session_free(c);
            for (size_t p = 2 * few_tests; p < sizeof pieces / sizeof *pieces - few_tests; p++) {
                bml_session *g = session_on(cuda(format), (bml_session_options){.kv_dtype = kv[k]});
                eval(g, 0, ids, n, pieces[p], got);
                bml_session_free(g);
                double off = distance(got, wanted, n, VOCAB);
                double bound = kv[k] == BML_F32 ? bounds[format] : fmax(bounds[format], 1e-2);
                print_message("format %d, cache %d, pieces of %3zu: off by %.2e\n", format, k,
                              pieces[p], off);
                if (!(off <= bound))
                    fail_msg("allowed is %.2e", bound);
            }
        }
}

/* Many slots of different lengths in one pass, against each alone. */
static void test_slots(void **state)
{
    (void)state;
    enum { SLOTS = 21, LONGEST = 60 };
    if (few_tests)
        skip();
    static float together[SLOTS * VOCAB], alone[VOCAB], scratch[LONGEST * VOCAB];
    int32_t ids[SLOTS][LONGEST];
    for (int format = BML_WEIGHTS_F32; format <= BML_WEIGHTS_Q4; format++) {
        bml_dtype kv = format == BML_WEIGHTS_BF16 ? BML_BF16 : BML_F32;
        bml_session *s =
            session_on(cuda(format), (bml_session_options){.n_slots = SLOTS, .kv_dtype = kv});
        bml_session *one = session_on(cuda(format), (bml_session_options){.kv_dtype = kv});
        bml_batch_token step[SLOTS];
        for (int slot = 0; slot < SLOTS; slot++) {
            random_ids(ids[slot], LONGEST, (uint64_t)slot);
            eval(s, slot, ids[slot], (size_t)slot * 2 + 1, LONGEST, scratch);
            step[slot] = (bml_batch_token){ids[slot][slot * 2 + 1], slot, true};
        }
        ok(bml_session_eval(s, step, SLOTS, together, &failure));
        for (int slot = 0; slot < SLOTS; slot++) {
            ok(bml_session_truncate(one, 0, 0, &failure));
            eval(one, 0, ids[slot], (size_t)slot * 2 + 1, LONGEST, scratch);
            eval(one, 0, ids[slot] + slot * 2 + 1, 1, 1, alone);
            double off = distance(together + slot * VOCAB, alone, 1, VOCAB);
            if (!(off <= fmax(bounds[format], 1e-3)))
                fail_msg("format %d, slot %d: off by %.2e", format, slot, off);
        }
        bml_session_free(s);
        bml_session_free(one);
    }
}

/* SLOT % 41 tokens in each slot, which SEED and the slot decide. */
static void fill_slots(bml_session *s, int n_slots, uint64_t seed)
{
    static bml_batch_token batch[300 * 41];
    int32_t ids[41];
    size_t n = 0;
    for (int slot = 0; slot < n_slots; slot++) {
        random_ids(ids, 41, seed + (uint64_t)slot);
        for (int t = 0; t < slot % 41; t++)
            batch[n++] = (bml_batch_token){ids[t], slot, false};
    }
    ok(bml_session_eval(s, batch, n, NULL, &failure));
}

/* Decoding batches, each sequence at a place of its own, against the kernels one by one; what comes
 * again is a graph. A row has the same bits whatever the others are. */
static void test_batches(void **state)
{
    (void)state;
    enum { SLOTS = 300 };
    static const int sizes[] = {2, 5, 8, 9, 33, 64, 65, 130, 256, 300};
    static float fused[SLOTS * VOCAB], single[SLOTS * VOCAB], other[SLOTS * VOCAB];
    int n_slots = few_tests ? 65 : SLOTS;
    for (int format = BML_WEIGHTS_BF16; format <= (few_tests ? BML_WEIGHTS_BF16 : BML_WEIGHTS_Q4);
         format++) {
        bml_session_options options = {
            .n_slots = n_slots,
            .n_ctx = 128,
            .kv_dtype = format == BML_WEIGHTS_F16 || format == BML_WEIGHTS_Q4 ? BML_F16 : BML_BF16};
        bml_session *sessions[3];
        for (int i = 0; i < 3; i++) {
            sessions[i] = session_on(cuda(format), options);
            sessions[i]->kernel_by_kernel = i == 1;
            fill_slots(sessions[i], n_slots, i == 2 ? 1000 : 0);
        }
        uint64_t seed = 3;
        for (size_t i = 6 * few_tests; i < sizeof sizes / sizeof *sizes; i++)
            for (int step = 0; step < 3 - 2 * few_tests; step++) {
                bml_batch_token batch[SLOTS];
                int32_t next[SLOTS];
                int n = sizes[i], n_rows = 0;
                if (n > n_slots)
                    continue;
                for (int t = 0; t < n; t++) {
                    bool wanted = t % 3 != 1 || step == 0;
                    batch[t] = (bml_batch_token){(int32_t)(test_random(&seed) % VOCAB), t, wanted};
                    n_rows += wanted;
                }
                ok(bml_session_eval(sessions[0], batch, (size_t)n, fused, &failure));
                ok(bml_session_eval(sessions[1], batch, (size_t)n, single, &failure));
                double off = distance(fused, single, (size_t)n_rows, VOCAB);
                if (!(off <= fmax(bounds[format], 1e-2)))
                    fail_msg("format %d, %d sequences: off by %.2e", format, n, off);
                for (int t = 1; t < n; t++)
                    batch[t].token = (batch[t].token + 1) % VOCAB;
                ok(bml_session_eval(sessions[2], batch, (size_t)n, other, &failure));
                assert_memory_equal(fused, other, VOCAB * sizeof *fused);

                for (int t = 0; t < n; t++)
                    batch[t] = (bml_batch_token){t, t, true};
                ok(bml_session_eval_argmax(sessions[0], batch, (size_t)n, next, &failure));
                ok(bml_session_eval(sessions[1], batch, (size_t)n, single, &failure));
                ok(bml_session_eval(sessions[2], batch, (size_t)n, other, &failure));
                for (int t = 0; t < n; t++) {
                    const float *row = single + (size_t)t * VOCAB;
                    float best = row[0], size = 0;
                    for (int id = 0; id < VOCAB; id++) {
                        best = fmaxf(best, row[id]);
                        size = fmaxf(size, fabsf(row[id]));
                    }
                    assert_in_range(next[t], 0, VOCAB - 1);
                    assert_true(row[next[t]] >= best - fmax(bounds[format], 1e-2) * size);
                }
            }
        for (int i = 0; i < 3; i++)
            bml_session_free(sessions[i]);
    }
}

/* Prompts of shapes that come again, and so are graphs, against the same that come first. */
static void test_prompts(void **state)
{
    (void)state;
    enum { SLOTS = 3, TIMES = 5, LONGEST = 150 };
    static const int lengths[] = {LONGEST, 70};
    static float again[VOCAB], first[VOCAB];
    bml_session_options options = {.n_slots = SLOTS, .kv_dtype = BML_BF16};
    bml_session *kept = session_on(cuda(BML_WEIGHTS_BF16), options);
    for (int time = 0; time < (few_tests ? 2 : TIMES); time++)
        for (int i = few_tests; i < 2; i++) {
            bml_session *fresh = session_on(cuda(BML_WEIGHTS_BF16), options);
            bml_batch_token batch[LONGEST];
            int32_t ids[LONGEST], got, wanted;
            int n = lengths[i], slot = (time + i) % SLOTS;
            random_ids(ids, LONGEST, (uint64_t)(10 * time + i));
            for (int t = 0; t < n; t++)
                batch[t] = (bml_batch_token){ids[t], slot, t + 1 == n};
            ok(bml_session_truncate(kept, slot, 0, &failure));
            ok(bml_session_eval_argmax(kept, batch, (size_t)n, &got, &failure));
            ok(bml_session_eval_argmax(fresh, batch, (size_t)n, &wanted, &failure));
            assert_int_equal(got, wanted);
            eval(kept, slot, &got, 1, 1, again); /* what is in the cache */
            eval(fresh, slot, &got, 1, 1, first);
            assert_true(distance(again, first, 1, VOCAB) <= 1e-5);
            bml_session_free(fresh);
        }
    bml_session_free(kept);
}

/* Passes of one token, of tokens of one slot and of several against the kernels one by one; what
 * comes a second time may be a graph. */
static void check_variant(const variant *v, bml_weight_format format, bml_dtype kv)
{
    enum { SLOTS = 3, LONGEST = 70, WIDEST = 320 };
    static const int batches[][SLOTS] = {{1, 0, 0}, {1, 0, 0}, {9, 0, 0}, {1, 1, 1},
                                         {1, 1, 1}, {3, 1, 5}, {0, 2, 0}, {0, 40, 30}};
    static float fused[LONGEST * WIDEST], single[LONGEST * WIDEST];
    bml_model_options model_options = {BML_BACKEND_CUDA, format};
    bml_model *model;
    ok(bml_model_load(v->directory, &model_options, &model, &failure));
    size_t vocab = (size_t)bml_model_get_info(model)->vocab_size;
    assert_true(vocab <= WIDEST);
    bml_session_options options = {.n_slots = SLOTS, .kv_dtype = kv};
    bml_session *a = session_on(model, options), *b = session_on(model, options);
    b->kernel_by_kernel = true;
    uint64_t seed = 5;
    for (size_t i = 0; i < sizeof batches / sizeof *batches; i++) {
        bml_batch_token batch[LONGEST];
        size_t n = random_batch(batch, batches[i], SLOTS, vocab, &seed);
        ok(bml_session_eval(a, batch, n, fused, &failure));
        ok(bml_session_eval(b, batch, n, single, &failure));
        double off = distance(fused, single, n, vocab);
        if (!(off <= 2 * bounds[format])) /* fewer terms than in a large model, so less evens out */
            fail_msg("%s, format %d, batch %zu: off by %.2e", v->name, format, i, off);
    }
    bml_session_free(a);
    bml_session_free(b);
    bml_model_free(model);
}

/* Tiny models whose widths, heads and vocabularies are multiples of nothing. */
static void test_variants(void **state)
{
    (void)state;
    static variant variants[MAX_VARIANTS];
    size_t n = find_variants(variants);
    if (few_tests)
        skip();
    assert_true(n >= MIN_VARIANTS);
    for (size_t i = 0; i < n; i++) {
        check_variant(&variants[i], BML_WEIGHTS_F32, BML_F32);
        check_variant(&variants[i], BML_WEIGHTS_BF16, BML_BF16);
        check_variant(&variants[i], BML_WEIGHTS_F16, BML_F16);
    }
}

static int32_t best_of(const float *row, int32_t n)
{
    int32_t best = 0;
    for (int32_t id = 1; id < n; id++)
        best = row[id] > row[best] ? id : best;
    return best;
}

/* Steps of one token, where keys begin and where blocks begin to share them out, against the
 * kernels one by one; what is in the cache before is theirs. */
static void check_steps(const bml_model *model, const char *name, bml_weight_format format,
                        bml_dtype kv)
{
    enum { SECOND = 127, END = 133, VOCABULARY = RANDOM_VOCAB };
    static float fused[SECOND * VOCABULARY], single[SECOND * VOCABULARY];
    int32_t ids[END], next;
    bml_session *a = session_on(model, (bml_session_options){.kv_dtype = kv});
    bml_session *b = session_on(model, (bml_session_options){.kv_dtype = kv});
    /* Fewer terms than in a large model, so less evens out. */
    double bound = fmax(2 * bounds[format], kv == BML_F32 ? 0 : 1e-2);
    for (int i = 0; i < END; i++)
        ids[i] = 97 * i % VOCABULARY;
    b->kernel_by_kernel = true;
    for (int at = 0, n; at < (few_tests ? SECOND + 1 : END); at += n) {
        bool step = at < 2 - few_tests || at >= SECOND;
        n = step ? 1 : SECOND - at;
        a->kernel_by_kernel = !step;
        eval(a, 0, ids + at, (size_t)n, (size_t)n, fused);
        eval(b, 0, ids + at, (size_t)n, (size_t)n, single);
        double off = distance(fused, single, (size_t)n, VOCABULARY);
        if (!(off <= bound))
            fail_msg("%s, format %d, cache %d, position %d: off by %.2e", name, format, kv, at,
                     off);
        if (step) {
            bml_batch_token again = {ids[at], 0, true};
            ok(bml_session_truncate(a, 0, at, &failure));
            ok(bml_session_eval_argmax(a, &again, 1, &next, &failure));
            assert_int_equal(next, best_of(fused, VOCABULARY));
        }
    }
    assert_true(a->queue->decoder || !a->queue->device->n_clusters);
    bml_session_free(a);
    bml_session_free(b);
}

/* Steps of two to eight sequences, one of them empty, against the kernels one by one. */
static void check_few(const bml_model *model, const char *name, bml_weight_format format,
                      bml_dtype kv)
{
    enum { MOST = 8, LONGEST = 150, VOCABULARY = RANDOM_VOCAB };
    static float fused[LONGEST * VOCABULARY], single[LONGEST * VOCABULARY];
    bml_session_options options = {.n_slots = MOST, .kv_dtype = kv};
    bml_session *a = session_on(model, options), *b = session_on(model, options);
    double bound = fmax(2 * bounds[format], kv == BML_F32 ? 0 : 1e-2);
    int32_t ids[LONGEST];
    for (int i = 0; i < LONGEST; i++)
        ids[i] = 31 * i % VOCABULARY;
    a->kernel_by_kernel = b->kernel_by_kernel = true;
    bml_batch_token before[MOST * LONGEST];
    size_t n_before = 0;
    for (int slot = 0; slot < MOST; slot++)
        for (int t = 0; t < 67 * slot % LONGEST; t++)
            before[n_before++] = (bml_batch_token){ids[t], slot, false};
    ok(bml_session_eval(a, before, n_before, NULL, &failure));
    ok(bml_session_eval(b, before, n_before, NULL, &failure));
    a->kernel_by_kernel = false;
    for (int n = few_tests ? MOST : 2; n <= MOST; n++)
        for (int step = 0; step < 2 - few_tests; step++) {
            bml_batch_token batch[MOST];
            int32_t next[MOST];
            for (int t = 0; t < n; t++)
                batch[t] = (bml_batch_token){(53 * n + 7 * t + step) % VOCABULARY,
                                             (t + 3 * step) % MOST, true};
            ok(bml_session_eval(a, batch, (size_t)n, fused, &failure));
            ok(bml_session_eval(b, batch, (size_t)n, single, &failure));
            double off = distance(fused, single, (size_t)n, VOCABULARY);
            if (!(off <= bound))
                fail_msg("%s, format %d, cache %d, %d sequences: off by %.2e", name, format, kv, n,
                         off);
            for (int t = 0; t < n; t++) {
                int slot = batch[t].slot;
                ok(bml_session_truncate(a, slot, bml_session_length(a, slot) - 1, &failure));
            }
            ok(bml_session_eval_argmax(a, batch, (size_t)n, next, &failure));
            for (int t = 0; t < n; t++)
                assert_int_equal(next[t], best_of(fused + t * VOCABULARY, VOCABULARY));
        }
    bml_session_free(a);
    bml_session_free(b);
}

/* Widths that blocks do not share out evenly, heads of both sizes, and the widths of GPT-2, for
 * which there are kernels of their own. */
static void test_widths(void **state)
{
    (void)state;
    static const random_shape shapes[] = {
        {128, 2, 512, 0},    {192, 3, 768, 0},   {320, 5, 1280, 0},  {448, 7, 1792, 0},
        {192, 3, 400, 0},    {256, 2, 1024, 0},  {768, 12, 3072, 0}, {1024, 16, 4096, 0},
        {1280, 20, 5120, 0}, {1600, 25, 6400, 0}};
    static const bml_dtype kv[] = {BML_F32, BML_BF16, BML_F16};
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++) {
        if (few_tests && i != 1 && i != 6)
            continue;
        char name[64], *directory = make_random_model(&shapes[i], i);
        snprintf(name, sizeof name, "n_embd %d, %d heads, n_inner %d", shapes[i].n_embd,
                 shapes[i].n_head, shapes[i].n_inner);
        int format = few_tests ? BML_WEIGHTS_F16 : BML_WEIGHTS_F32; /* few: and Q4 */
        for (; format <= BML_WEIGHTS_Q4; format += 1 + few_tests) {
            bml_model_options options = {BML_BACKEND_CUDA, (bml_weight_format)format};
            bml_model *model;
            ok(bml_model_load(directory, &options, &model, &failure));
            for (int k = few_tests; k < 3 - few_tests; k++) { /* few: BF16 */
                check_steps(model, name, (bml_weight_format)format, kv[k]);
                if (!few_tests || format == BML_WEIGHTS_F16)
                    check_few(model, name, (bml_weight_format)format, kv[k]);
            }
            bml_model_free(model);
        }
        remove_tree(directory);
    }
}

/* Values of x that are small or large; what sums of 64 bits have no room for is no logit. */
static void test_scales(void **state)
{
    (void)state;
    static const random_shape shapes[] = {{192, 3, 768, 1e-3},   {192, 3, 768, 1e5},
                                          {768, 12, 3072, 1e-3}, {768, 12, 3072, 1e5},
                                          {192, 3, 768, 1e8},    {768, 12, 3072, 1e8}};
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++)
        for (int format = BML_WEIGHTS_F32; format <= BML_WEIGHTS_BF16; format++) {
            if (few_tests && i != 3)
                continue;
            char name[64], *directory = make_random_model(&shapes[i], i);
            snprintf(name, sizeof name, "n_embd %d, scale %g", shapes[i].n_embd, shapes[i].scale);
            bml_model_options options = {BML_BACKEND_CUDA, (bml_weight_format)format};
            bml_dtype kv = format == BML_WEIGHTS_F32 ? BML_F32 : BML_BF16;
            bml_model *model;
            ok(bml_model_load(directory, &options, &model, &failure));
            if (shapes[i].scale < 1e8) {
                check_steps(model, name, (bml_weight_format)format, kv);
                check_few(model, name, (bml_weight_format)format, kv);
            } else {
                bml_session *s = session_on(model, (bml_session_options){.n_slots = 2});
                const bml_batch_token batch[] = {{1, 0, true}, {2, 1, true}};
                int32_t next[2];
                for (size_t n = 1; n <= 2 && s->queue->device->n_clusters; n++)
                    if (n == 1 || format == BML_WEIGHTS_BF16)
                        assert_int_equal(bml_session_eval_argmax(s, batch, n, next, &failure),
                                         BML_ERR_NUMERIC);
                bml_session_free(s);
            }
            bml_model_free(model);
            remove_tree(directory);
        }
}

/* The device's argmax against the logits it is taken from, for one and for many sequences. */
static void test_argmax(void **state)
{
    (void)state;
    enum { SLOTS = 9, STEPS = 12 };
    static float logits[SLOTS * VOCAB];
    for (int format = few_tests ? BML_WEIGHTS_Q8 : BML_WEIGHTS_F32;
         format <= (few_tests ? BML_WEIGHTS_Q8 : BML_WEIGHTS_Q4); format++)
        for (int k = 0; k < 3; k += 1 + few_tests) {
            int n = (const int[]){1, SLOTS - 1, SLOTS}[k];
            bml_session_options options = {.n_slots = n};
            bml_session *a = session_on(cuda(format), options);
            bml_session *l = session_on(cuda(format), options);
            bml_batch_token batch[SLOTS];
            int32_t next[SLOTS];
            for (int i = 0; i < n; i++)
                batch[i] = (bml_batch_token){100 * i + format, i, true};
            for (int step = 0; step < (few_tests ? 1 : STEPS); step++) {
                ok(bml_session_eval_argmax(a, batch, (size_t)n, next, &failure));
                ok(bml_session_eval(l, batch, (size_t)n, logits, &failure));
                for (int i = 0; i < n; i++) {
                    const float *row = logits + i * VOCAB;
                    int32_t best = best_of(row, VOCAB);
                    assert_int_equal(next[i], best);
                    batch[i].token = best;
                }
            }
            bml_session_free(a);
            bml_session_free(l);
        }
}

/* Tokens drawn on the device against those that the host draws from the device's logits. */
static void test_sampling(void **state)
{
    (void)state;
    enum { SLOTS = 9, STEPS = 60 };
    static float logits[SLOTS * VOCAB];
    int drawn = 0, others = 0;
    if (few_tests)
        skip();
    for (int format = BML_WEIGHTS_F32; format <= BML_WEIGHTS_Q4; format++)
        for (int k = 0; k < 3; k++) {
            int n = (const int[]){1, 3, SLOTS}[k];
            bml_session_options options = {.n_slots = n, .kv_dtype = k ? BML_BF16 : BML_F32};
            bml_session *a = session_on(cuda(format), options);
            bml_session *l = session_on(cuda(format), options);
            bml_sampling sampling[SLOTS];
            bml_batch_token batch[SLOTS];
            for (int i = 0; i < n; i++) {
                sampling[i] = bml_sampling_default();
                sampling[i].seed = (uint64_t)(100 * format + i);
                sampling[i].temperature = 0.7f + 0.1f * (float)i;
                sampling[i].top_k = (const int[]){40, 0, 5, 0, 1000}[i % 5];
                sampling[i].top_p = i % 3 == 1 ? 0.9f : 1;
                sampling[i].min_p = i % 4 == 3 ? 0.01f : 0;
                batch[i] = (bml_batch_token){100 * i + format, i, true};
            }
            for (uint64_t step = 0; step < STEPS; step++) {
                uint64_t steps[SLOTS];
                int32_t next[SLOTS], wanted;
                for (int i = 0; i < n; i++)
                    steps[i] = step + (uint64_t)i;
                ok(bml_session_eval_sample(a, batch, (size_t)n, sampling, steps, next, &failure));
                ok(bml_session_eval(l, batch, (size_t)n, logits, &failure));
                for (int i = 0; i < n; i++) {
                    ok(bml_sample(&sampling[i], logits + i * VOCAB, VOCAB, NULL, 0, steps[i],
                                  &wanted, &failure));
                    drawn++;
                    others += next[i] != wanted;
                    batch[i].token = wanted;
                }
            }
            bml_session_free(a);
            bml_session_free(l);
        }
    print_message("sampling: %d of %d draws are others\n", others, drawn);
    assert_true(others * 1000 <= drawn);
}

/* 200 greedy tokens from each of some prompts, the same ids as the CPU's. */
static void test_greedy(void **state)
{
    (void)state;
    if (few_tests)
        skip();
    static const char *const prompts[] = {"Once upon a time", "The", "In the morning, the king",
                                          "\"Who are you?\" said"};
    bml_generate_options options = {.max_tokens = 200, .ignore_eos = true};
    options.sampling = bml_sampling_default();
    options.sampling.temperature = 0;
    bml_session *c = session_on(cpu(BML_WEIGHTS_F32), (bml_session_options){0});
    bml_session *g = session_on(cuda(BML_WEIGHTS_F32), (bml_session_options){0});
    for (size_t p = 0; p < sizeof prompts / sizeof *prompts; p++) {
        int32_t *ids;
        size_t n;
        bml_generation wanted, got;
        ok(bml_tokenize(bml_model_get_tokenizer(cpu(BML_WEIGHTS_F32)), prompts[p],
                        strlen(prompts[p]), false, &ids, &n, &failure));
        ok(bml_generate(c, 0, ids, n, &options, &wanted, &failure));
        ok(bml_generate(g, 0, ids, n, &options, &got, &failure));
        assert_int_equal(got.n_ids, 200);
        assert_memory_equal(got.ids, wanted.ids, 200 * sizeof *got.ids);
        bml_generation_clear(&wanted);
        bml_generation_clear(&got);
        bml_free(ids);
    }
    bml_session_free(c);
    bml_session_free(g);
}

/* GPT-2 124M with random weights, float32: 256 tokens, each the most probable after the CPU's.
 * Where the two differ the CPU must hold both for equally probable, but for rounding. */
static void test_gpt2_greedy(void **state)
{
    (void)state;
    enum { STEPS = 256, GPT2_VOCAB = 50257 };
    static float logits[GPT2_VOCAB];
    if (few_tests)
        skip();
    char *directory = make_temp();
    ok(bml_synth("gpt2", 1, BML_F32, directory, NULL, NULL, &failure));
    bml_model *models[2];
    bml_session *sessions[3]; /* the CPU's, once more for its logits, and CUDA's */
    for (int i = 0; i < 2; i++) {
        bml_model_options options = {i ? BML_BACKEND_CUDA : BML_BACKEND_CPU, BML_WEIGHTS_F32};
        ok(bml_model_load(directory, &options, &models[i], &failure));
    }
    for (int i = 0; i < 3; i++)
        sessions[i] = session_on(models[i == 2], (bml_session_options){.n_ctx = STEPS});
    int ties = 0;
    bml_batch_token token = {42, 0, true};
    for (int step = 0; step < STEPS; step++) {
        int32_t wanted, got;
        ok(bml_session_eval_argmax(sessions[0], &token, 1, &wanted, &failure));
        ok(bml_session_eval(sessions[1], &token, 1, logits, &failure));
        ok(bml_session_eval_argmax(sessions[2], &token, 1, &got, &failure));
        double apart = fabs((double)logits[wanted] - logits[got]);
        if (!(apart <= 1e-5 * fabs(logits[wanted])))
            fail_msg("step %d: %d in place of %d, %g apart", step, (int)got, (int)wanted, apart);
        ties += got != wanted;
        token.token = wanted;
    }
    print_message("greedy: %d of %d steps are ties\n", ties, STEPS);
    for (int i = 0; i < 3; i++)
        bml_session_free(sessions[i]);
    for (int i = 0; i < 2; i++)
        bml_model_free(models[i]);
    remove_tree(directory);
}

/* What --kv auto takes: a 16-bit cache for weights that have no more. */
static void test_kv_dtype(void **state)
{
    (void)state;
    static const bml_dtype wanted[] = {[BML_WEIGHTS_F32] = BML_F32,
                                       [BML_WEIGHTS_BF16] = BML_BF16,
                                       [BML_WEIGHTS_F16] = BML_F16,
                                       [BML_WEIGHTS_Q8] = BML_BF16,
                                       [BML_WEIGHTS_Q4] = BML_BF16};
    for (int format = BML_WEIGHTS_F32; format <= BML_WEIGHTS_Q4; format++) {
        assert_int_equal(bml_model_get_info(cuda(format))->kv_dtype, wanted[format]);
        assert_int_equal(bml_model_get_info(cpu(format))->kv_dtype, BML_F32);
    }
}

int main(void)
{
    static const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_logits),      cmocka_unit_test(test_slots),
        cmocka_unit_test(test_argmax),      cmocka_unit_test(test_greedy),
        cmocka_unit_test(test_gpt2_greedy), cmocka_unit_test(test_variants),
        cmocka_unit_test(test_batches),     cmocka_unit_test(test_chains),
        cmocka_unit_test(test_chain_ends),  cmocka_unit_test(test_chains_in_threads),
        cmocka_unit_test(test_patience),    cmocka_unit_test(test_prompts),
        cmocka_unit_test(test_widths),      cmocka_unit_test(test_scales),
        cmocka_unit_test(test_sampling),    cmocka_unit_test(test_kv_dtype),
    };
    bml_device *device;
    if (bml_backend_cuda()->open(&device, &failure)) {
        printf("skipped: %s\n", failure.message);
        return getenv("BML_REQUIRE_CUDA") != NULL;
    }
    bml_backend_cuda()->close(device);
    few_tests = getenv("BML_FEW_TESTS") != NULL;
    cmocka_set_test_filter(getenv("BML_TESTS"));
    int failed = run_kernel_suite(&(kernel_suite){.title = "kernels, cuda",
                                                  .backend = bml_backend_cuda(),
                                                  .seed = 7,
                                                  .quantizes_activations = true,
                                                  .packer = bml_backend_cpu(),
                                                  .few = few_tests});
    return failed + cmocka_run_group_tests_name("passes, cuda", tests, NULL, free_models);
}
