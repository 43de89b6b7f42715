/* peak_rss FILE PROGRAM ARGUMENTS: runs the program and writes its peak resident bytes to FILE. */
#include <stdio.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

int main(int argc, char **argv)
{
    if (argc < 3)
        return 2;
    pid_t child = fork();
    if (child == 0) {
        execv(argv[2], argv + 2);
        _exit(127);
    }
    int status;
    struct rusage usage;
    if (child < 0 || waitpid(child, &status, 0) < 0 || getrusage(RUSAGE_CHILDREN, &usage) != 0)
        return 2;
#ifdef __APPLE__
    long long bytes = usage.ru_maxrss;
#else
    long long bytes = 1024LL * usage.ru_maxrss;
#endif
    FILE *file = fopen(argv[1], "w");
    if (!file || fprintf(file, "%lld\n", bytes) < 0 || fclose(file) != 0)
        return 2;
    return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}
