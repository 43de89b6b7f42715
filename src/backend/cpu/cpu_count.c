/* How many threads may run at once: affinity mask and cgroup quota (versions 2 and 1). */
#define _GNU_SOURCE
#include "backend/cpu/pool.h"

#include <stdio.h>
#include <string.h>
#include <unistd.h>
#ifdef __linux__
#include <sched.h>
#endif

#ifdef __linux__
/* CPUs' worth of quota in one cgroup directory; 0 if it sets no limit. */
static double quota_of(const char *directory, bool v2)
{
    char path[1200], text[64] = "";
    double quota = 0, period = 0;
    snprintf(path, sizeof path, "%s/%s", directory, v2 ? "cpu.max" : "cpu.cfs_quota_us");
    FILE *file = fopen(path, "re");
    if (!file)
        return 0;
    if (fgets(text, sizeof text, file) && v2 && sscanf(text, "%lf %lf", &quota, &period) != 2)
        quota = 0; /* "max" */
    fclose(file);
    if (!v2) {
        snprintf(path, sizeof path, "%s/cpu.cfs_period_us", directory);
        FILE *period_file = fopen(path, "re");
        if (!period_file)
            return 0;
        if (sscanf(text, "%lf", &quota) != 1 || fscanf(period_file, "%lf", &period) != 1)
            quota = 0;
        fclose(period_file);
    }
    return quota > 0 && period > 0 ? quota / period : 0;
}

/* The tightest quota on the way from ROOT/GROUP up to ROOT; 0 for none. */
static double tightest_quota(const char *root, const char *group, bool v2)
{
    char directory[1100];
    double tightest = 0;
    snprintf(directory, sizeof directory, "%s%s", root, group);
    for (;;) {
        double quota = quota_of(directory, v2);
        if (quota > 0 && (tightest == 0 || quota < tightest))
            tightest = quota;
        char *slash = strrchr(directory, '/');
        if (strlen(directory) <= strlen(root) || !slash)
            return tightest;
        *slash = 0;
    }
}

static double cgroup_quota(void)
{
    double tightest = 0;
    char line[1024];
    FILE *file = fopen("/proc/self/cgroup", "re");
    if (!file)
        return 0;
    while (fgets(line, sizeof line, file)) { /* "ID:CONTROLLERS:PATH" */
        line[strcspn(line, "\n")] = 0;
        char *controllers = strchr(line, ':');
        char *group = controllers ? strchr(controllers + 1, ':') : NULL;
        if (!group)
            continue;
        *group++ = 0;
        controllers++;
        bool v2 = !*controllers;
        if (!v2 && !strstr(controllers, "cpu,") && strcmp(controllers, "cpu") != 0)
            continue;
        double quota = tightest_quota(v2 ? "/sys/fs/cgroup" : "/sys/fs/cgroup/cpu", group, v2);
        if (quota > 0 && (tightest == 0 || quota < tightest))
            tightest = quota;
    }
    fclose(file);
    return tightest;
}
#endif

int bml_cpu_count(void)
{
    int count = (int)sysconf(_SC_NPROCESSORS_ONLN);
#ifdef __linux__
    cpu_set_t set;
    if (sched_getaffinity(0, sizeof set, &set) == 0)
        count = CPU_COUNT(&set);
    double quota = cgroup_quota();
    if (quota > 0 && quota < count)
        count = (int)quota < quota ? (int)quota + 1 : (int)quota;
#endif
    return count < 1 ? 1 : count;
}
