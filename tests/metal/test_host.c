/* The backend's use of Metal, counted and watched by the stand-in: one command buffer a pass,
 * nothing made after the first, files wrapped in place, failures as errors, no leaks. */
#include "backend/metal/metal.h"
#include "gpt2/session.h"

#include "golden.h"
#include "standin.h"

#define MODEL PROJECT_SOURCE "/models/storyteller"
#define TINY TEST_DATA "/variants/heads-of-64"

static bml_error err;

static bml_model *load(const char *name, bml_weight_format format)
{
    bml_model *model;
    bml_model_options options = {BML_BACKEND_METAL, format};
    expect_ok(bml_model_load(name, &options, &model, &err), &err);
    return model;
}

static bml_session *session_of(const bml_model *model)
{
    bml_session *session;
    bml_session_options options = {.n_slots = 2, .chunk = 16};
    expect_ok(bml_session_new(model, &options, &session, &err), &err);
    return session;
}

static void eval(bml_session *session, int slot, size_t n)
{
    bml_batch_token batch[64];
    int32_t next[64];
    for (size_t i = 0; i < n; i++)
        batch[i] = (bml_batch_token){(int32_t)i, slot, i + 1 == n};
    expect_ok(bml_session_eval_argmax(session, batch, n, next, &err), &err);
}

/* Whatever comes after the first pass, be it longer or of another shape, makes nothing new. */
static void test_one_command_buffer_a_pass(void **state)
{
    (void)state;
    static const bml_weight_format formats[] = {BML_WEIGHTS_FILE, BML_WEIGHTS_Q8, BML_WEIGHTS_Q4};
    for (size_t f = 0; f < sizeof formats / sizeof *formats; f++) {
        bml_model *model = load(TINY, formats[f]);
        bml_session *session = session_of(model);
        eval(session, 0, 1);
        standin_counts first = standin_get_counts();
        eval(session, 0, 1);
        eval(session, 1, 16);
        eval(session, 0, 5);
        eval(session, 0, 30); /* two chunks of 16 */
        standin_counts later = standin_get_counts();
        assert_int_equal(later.command_buffers - first.command_buffers, 5);
        assert_int_equal(later.encoders - first.encoders, 5);
        assert_int_equal(later.buffers, first.buffers);
        assert_int_equal(later.functions, first.functions);
        assert_int_equal(later.pipelines, first.pipelines);
        assert_int_equal(later.libraries, first.libraries);
        assert_int_equal(later.live_objects, first.live_objects);
        assert_true(later.most_threadgroup_bytes <= METAL_MAX_THREADGROUP_BYTES);
        bml_session_free(session);
        bml_model_free(model);
    }
}

/* docs/metal.md counts five dispatches a layer and four more. */
static void test_dispatches_of_a_step(void **state)
{
    (void)state;
    static const bml_weight_format formats[] = {BML_WEIGHTS_FILE, BML_WEIGHTS_Q4};
    for (size_t f = 0; f < 2; f++) {
        bml_model *model = load(TINY, formats[f]);
        bml_session *session = session_of(model);
        eval(session, 0, 3);
        size_t before = standin_get_counts().dispatches;
        eval(session, 0, 1);
        assert_int_equal(standin_get_counts().dispatches - before,
                         5 * bml_model_get_info(model)->n_layer + 4);
        bml_session_free(session);
        bml_model_free(model);
    }
}

/* Matrices of the mapped file are used where they lie; those that must change are copied. */
static void test_weights_in_place(void **state)
{
    (void)state;
    for (int converted = 0; converted < 2; converted++) {
        size_t before = standin_get_counts().wrapped;
        bml_model *model = load(MODEL, converted ? BML_WEIGHTS_F16 : BML_WEIGHTS_FILE);
        size_t wrapped = standin_get_counts().wrapped - before, matrices = 8 * 4 + 2;
        assert_int_equal(wrapped, converted ? 0 : matrices);
        const bml_weight *wte = &model->weights.wte;
        const char *mapped = model->checkpoint->wte.data;
        assert_int_equal((const char *)wte->buffer.data == mapped, !converted);
        bml_model_free(model);
    }
}

/* Where Metal does not take the file's pages, as on virtual machines, they are copied. */
static void test_weights_copied(void **state)
{
    (void)state;
    standin_refuse_pages(true);
    bml_model *model = load(TINY, BML_WEIGHTS_FILE);
    standin_refuse_pages(false);
    const bml_buffer *wte = &model->weights.wte.buffer;
    const void *mapped = model->checkpoint->wte.data;
    assert_ptr_not_equal(wte->data, mapped);
    assert_memory_equal(wte->data, mapped, wte->bytes);
    bml_model_free(model);
}

static void test_nothing_leaks(void **state)
{
    (void)state;
    size_t before = standin_get_counts().live_objects;
    bml_model *model = load(TINY, BML_WEIGHTS_Q8);
    bml_session *session = session_of(model);
    eval(session, 0, 20);
    assert_true(standin_get_counts().live_objects > before);
    bml_session_free(session);
    bml_model_free(model);
    assert_int_equal(standin_get_counts().live_objects, before);
    assert_null(metal_take_fault());
}

/* Sessions of one model in threads of their own get what each gets alone. */
typedef struct worker {
    const bml_model *model;
    int32_t first, next[12];
} worker;

static void *generate(void *context)
{
    worker *w = context;
    bml_session *session = session_of(w->model);
    bml_batch_token token = {w->first, 0, true};
    for (size_t i = 0; i < sizeof w->next / sizeof *w->next; i++) {
        bml_error own;
        expect_ok(bml_session_eval_argmax(session, &token, 1, &w->next[i], &own), &own);
        token.token = w->next[i];
    }
    bml_session_free(session);
    return NULL;
}

static void test_sessions_in_threads(void **state)
{
    (void)state;
    enum { N = 3 };
    bml_model *model = load(TINY, BML_WEIGHTS_FILE);
    worker alone[N], together[N];
    pthread_t threads[N];
    for (int i = 0; i < N; i++) {
        together[i] = (worker){.model = model, .first = 7 * i};
        alone[i] = together[i];
        assert_int_equal(pthread_create(&threads[i], NULL, generate, &together[i]), 0);
    }
    for (int i = 0; i < N; i++)
        pthread_join(threads[i], NULL);
    for (int i = 0; i < N; i++) {
        generate(&alone[i]);
        assert_memory_equal(alone[i].next, together[i].next, sizeof alone[i].next);
    }
    bml_model_free(model);
}

/* ---- failures ---------------------------------------------------------------------------------*/

static void test_no_device(void **state)
{
    (void)state;
    bml_model *model;
    bml_model_options options = {.backend = BML_BACKEND_METAL};
    size_t before = standin_get_counts().live_objects;
    standin_set_device(false, false);
    assert_int_equal(bml_model_load(TINY, &options, &model, &err), BML_ERR_UNSUPPORTED);
    assert_non_null(strstr(err.message, "Metal"));
    options.backend = BML_BACKEND_AUTO;
    expect_ok(bml_model_load(TINY, &options, &model, &err), &err);
    assert_string_equal(bml_model_get_info(model)->backend, "cpu");
    bml_model_free(model);
    standin_set_device(true, true);
    expect_ok(bml_model_load(TINY, &options, &model, &err), &err);
    assert_string_equal(bml_model_get_info(model)->backend, "metal");
    bml_model_free(model);
    assert_int_equal(standin_get_counts().live_objects, before);
}

static void on_kernel(void *context, const char *kernel, int layer, double began, double ended)
{
    (void)kernel, (void)layer;
    assert_true(ended > began);
    ++*(size_t *)context;
}

/* A traced pass waits for each kernel, and gives the same logits. */
static void test_traced_pass(void **state)
{
    (void)state;
    static float plain[320], traced[320];
    int32_t id = 5;
    size_t n_kernels = 0, before;
    bml_model *model = load(TINY, BML_WEIGHTS_FILE);
    size_t bytes = (size_t)bml_model_get_info(model)->vocab_size * sizeof(float);
    bml_session *session = session_of(model);
    eval_all(session, 0, &id, 1, plain);
    bml_session_trace(session, on_kernel, &n_kernels);
    before = standin_get_counts().command_buffers;
    eval_all(session, 1, &id, 1, traced);
    assert_memory_equal(plain, traced, bytes);
    assert_int_equal(standin_get_counts().command_buffers - before, n_kernels + 1);
    bml_session_free(session);
    bml_model_free(model);
}

/* A GPU without simdgroup matrices gets the same logits from other kernels. */
static void test_no_matrices(void **state)
{
    (void)state;
    static float with[20 * 320], without[20 * 320];
    int32_t ids[20] = {3, 1, 4, 1, 5};
    bml_model *model = load(TINY, BML_WEIGHTS_FILE);
    size_t vocab = (size_t)bml_model_get_info(model)->vocab_size;
    bml_session *session = session_of(model);
    eval_all(session, 0, ids, 20, with);
    bml_session_free(session);
    bml_model_free(model);
    standin_set_device(true, false);
    size_t before = standin_get_counts().pipelines;
    model = load(TINY, BML_WEIGHTS_FILE);
    session = session_of(model);
    eval_all(session, 0, ids, 20, without);
    assert_true(standin_get_counts().pipelines > before);
    expect_logits("without matrices", without, with, 20 * vocab);
    assert_true(memcmp(with, without, 20 * vocab * sizeof *with) != 0);
    bml_session_free(session);
    bml_model_free(model);
    standin_set_device(true, true);
}

static void test_failures_are_errors(void **state)
{
    (void)state;
    size_t before = standin_get_counts().live_objects;
    bml_model *model = load(TINY, BML_WEIGHTS_FILE), *none;
    bml_session *session = session_of(model);
    bml_batch_token token = {1, 0, true};
    int32_t next;
    standin_fail_pipelines(true);
    assert_int_equal(bml_session_eval_argmax(session, &token, 1, &next, &err), BML_ERR_DEVICE);
    assert_non_null(strstr(err.message, "does not compile: the test wants no pipelines"));
    assert_int_equal(bml_session_length(session, 0), 0);
    standin_fail_pipelines(false);
    expect_ok(bml_session_eval_argmax(session, &token, 1, &next, &err), &err);
    bml_session_free(session);
    bml_model_free(model);

    bml_model_options options = {.backend = BML_BACKEND_METAL};
    standin_fail_buffers(true);
    assert_int_equal(bml_model_load(TINY, &options, &none, &err), BML_ERR_MEMORY);
    standin_fail_buffers(false);
    assert_int_equal(standin_get_counts().live_objects, before);
}

/* What Metal's validation would find in a dispatch comes out of end(). */
static void test_faults_end_the_pass(void **state)
{
    (void)state;
    const bml_backend *b = bml_backend_metal();
    bml_device *device;
    bml_queue *queue;
    bml_buffer x;
    bml_batch batch = {0};
    expect_ok(b->open(&device, &err), &err);
    expect_ok(b->queue_new(device, 0, &queue, &err), &err);
    expect_ok(b->buffer_new(device, 100 * sizeof(float), &x, &err), &err);
    expect_ok(b->begin(queue, &batch, &err), &err);
    b->gelu(queue, &x, 101, BML_ACT_RELU); /* one more than there are */
    assert_int_equal(b->end(queue, &err), BML_ERR_DEVICE);
    assert_non_null(strstr(err.message, "outside of everything bound"));

    elements_args args = {.n = 100};
    expect_ok(b->begin(queue, &batch, &err), &err);
    bml_metal_dispatch(queue, &(bml_metal_call){.kernel = BML_METAL_RESIDUAL_ADD,
                                                .buffers = {{&x, 0}},
                                                .n_buffers = 1,
                                                .args = &args,
                                                .args_bytes = sizeof args,
                                                .n_groups = 1});
    assert_int_equal(b->end(queue, &err), BML_ERR_DEVICE);
    assert_non_null(strstr(err.message, "buffer(2)"));

    expect_ok(b->begin(queue, &batch, &err), &err); /* in the middle of a pass */
    b->gelu(queue, &x, 101, BML_ACT_RELU);
    b->finish(queue);
    b->gelu(queue, &x, 100, BML_ACT_RELU);
    b->finish(queue);
    assert_int_equal(b->end(queue, &err), BML_ERR_DEVICE);
    assert_non_null(strstr(err.message, "outside of everything bound"));

    expect_ok(b->begin(queue, &batch, &err), &err);
    b->gelu(queue, &x, 100, BML_ACT_RELU);
    expect_ok(b->end(queue, &err), &err);
    b->buffer_free(device, &x);
    b->queue_free(queue);
    b->close(device);
}

/* Even if a compiler assumed fast math, GELU stays finite where naive forms do not. */
static void test_gelu_under_fast_math(void **state)
{
    (void)state;
    static const float x[] = {40, -40, 1e4f, -1e4f, 3e38f, -3e38f, 9.99f, -9.99f};
    static const float wanted[] = {40, 0, 1e4f, 0, 3e38f, 0, 9.99f, 0};
    enum { N = sizeof x / sizeof *x };
    const bml_backend *b = bml_backend_metal();
    bml_device *device;
    bml_queue *queue;
    bml_buffer buffer;
    standin_assume_fast_math(true);
    expect_ok(b->open(&device, &err), &err);
    expect_ok(b->queue_new(device, 0, &queue, &err), &err);
    expect_ok(b->buffer_new(device, sizeof x, &buffer, &err), &err);
    for (int activation = BML_ACT_GELU_TANH; activation <= BML_ACT_GELU_ERF; activation++) {
        bml_batch batch = {0};
        expect_ok(b->upload(queue, &buffer, x, sizeof x, &err), &err);
        expect_ok(b->begin(queue, &batch, &err), &err);
        b->gelu(queue, &buffer, N, (bml_activation)activation);
        expect_ok(b->end(queue, &err), &err);
        float got[N];
        expect_ok(b->download(queue, got, &buffer, sizeof got, &err), &err);
        for (int i = 0; i < N; i++)
            if (!(fabsf(got[i] - wanted[i]) <= 2e-6f + 1e-6f * fabsf(wanted[i])))
                fail_msg("activation %d of %g is %g", activation, (double)x[i], (double)got[i]);
    }
    b->buffer_free(device, &buffer);
    b->queue_free(queue);
    b->close(device);
    standin_assume_fast_math(false);
}

int main(void)
{
    static const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_one_command_buffer_a_pass),
        cmocka_unit_test(test_dispatches_of_a_step),
        cmocka_unit_test(test_weights_in_place),
        cmocka_unit_test(test_weights_copied),
        cmocka_unit_test(test_nothing_leaks),
        cmocka_unit_test(test_sessions_in_threads),
        cmocka_unit_test(test_no_device),
        cmocka_unit_test(test_traced_pass),
        cmocka_unit_test(test_no_matrices),
        cmocka_unit_test(test_failures_are_errors),
        cmocka_unit_test(test_faults_end_the_pass),
        cmocka_unit_test(test_gelu_under_fast_math),
    };
    return cmocka_run_group_tests_name("the host's use of Metal", tests, NULL, NULL);
}
