#include "cli.h"
#include "io.h"

#include <signal.h>
#include <string.h>

static const cli_command *const commands[] = {
    &bml_cli_generate,   &bml_cli_score, &bml_cli_logits,  &bml_cli_tokenize,
    &bml_cli_detokenize, &bml_cli_bench, &bml_cli_inspect, &bml_cli_synth};

enum { N_COMMANDS = sizeof commands / sizeof *commands };

static int print_help(void)
{
    bml_cli_print("usage: bml COMMAND [OPTION]...\n\n"
                  "GPT-2 inference from scratch. Without -m a command uses the built-in model,\n"
                  "a small teller of fairy tales: bml generate -p \"Once upon a time\"\n\n");
    for (int i = 0; i < N_COMMANDS; i++)
        bml_cli_print("  %-12s %s\n", commands[i]->name, commands[i]->summary);
    bml_cli_print("\nbml COMMAND --help tells a command's options; bml --version the version.\n"
                  "Exit status: 0 fine, 1 the work failed, 2 wrong usage.\n");
    return CLI_OK;
}

static const cli_command *find_command(const char *name)
{
    for (int i = 0; i < N_COMMANDS; i++)
        if (!strcmp(commands[i]->name, name))
            return commands[i];
    return NULL;
}

/* One line on stderr, naming what NAME looks most like. */
static int unknown(const char *name)
{
    if (name[0] == '-') {
        bml_cli_fail("unknown option '%s'; before a command there are only --help and --version",
                     name);
        return CLI_USAGE;
    }
    const char *best = "help";
    size_t distance = bml_cli_distance(name, best);
    for (int i = 0; i < N_COMMANDS; i++) {
        size_t d = bml_cli_distance(name, commands[i]->name);
        if (d < distance) {
            best = commands[i]->name;
            distance = d;
        }
    }
    bml_cli_fail("unknown command '%s'; did you mean %s? (see bml --help)", name, best);
    return CLI_USAGE;
}

static int dispatch(int argc, char **argv)
{
    if (argc < 2) {
        bml_cli_fail("no command; try bml generate, or see bml --help");
        return CLI_USAGE;
    }
    const char *name = argv[1];
    if (!strcmp(name, "--version") || !strcmp(name, "-V")) {
        bml_cli_print("bml %s\n", bml_version());
        return CLI_OK;
    }
    if (!strcmp(name, "--help") || !strcmp(name, "-h") || (!strcmp(name, "help") && argc == 2))
        return print_help();
    if (!strcmp(name, "help")) {
        const cli_command *command = find_command(argv[2]);
        if (!command)
            return unknown(argv[2]);
        bml_cli_help(command);
        return CLI_OK;
    }
    const cli_command *command = find_command(name);
    if (!command)
        return unknown(name);
    int n_operands;
    int status = bml_cli_parse(command, argc - 2, argv + 2, &n_operands);
    return status == CLI_CONTINUE ? command->run(n_operands, argv + 2) : status;
}

int main(int argc, char **argv)
{
    /* A closed pipe is then an ordinary write error. */
    signal(SIGPIPE, SIG_IGN);
    int status = dispatch(argc, argv);
    bml_cli_progress_end();
    int output_status = bml_cli_finish_output();
    return status ? status : output_status;
}
