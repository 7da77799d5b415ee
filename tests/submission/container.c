/* A stand-in for Pyxis: srun starts its tasks in a container, with the mounts that it is given.
 *
 * Like Pyxis, only srun has the options; variables of the image replace those of the job unless
 * --container-env names them; and the program is found in the container.  container.sh, the argument
 * of the plugin, makes the container's root directory. */
#define _GNU_SOURCE
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include <slurm/spank.h>

SPANK_PLUGIN(container, 1)

static char *script, *image, *mounts = "", *kept = "";
static int home;

static int accept_value(int value, const char *argument, int remote)
{
    if (value == 0)
        image = strdup(argument);
    else if (value == 1)
        mounts = strdup(argument);
    else if (value == 2)
        kept = strdup(argument);
    else
        home = 1;
    return 0;
}

static struct spank_option options[] = {
    {"container-image", "[USER@][REGISTRY#]IMAGE[:TAG]|PATH", "image", 1, 0, accept_value},
    {"container-mounts", "SRC:DST[:FLAGS]", "mounts", 1, 1, accept_value},
    {"container-env", "NAME[,NAME...]", "variables to keep", 1, 2, accept_value},
    {"container-mount-home", NULL, "mount the home directory", 0, 3, accept_value},
};

int slurm_spank_init(spank_t spank, int argc, char *argv[])
{
    if (spank_context() != S_CTX_LOCAL && spank_context() != S_CTX_REMOTE)
        return 0;
    script = argc ? strdup(argv[0]) : NULL;
    for (int i = 0; i < 4; i++)
        if (spank_option_register(spank, &options[i]))
            return -1;
    return 0;
}

static int is_kept(const char *name)
{
    char *list = strdup(kept), *rest = list, *each;
    while ((each = strsep(&rest, ",")))
        if (!strcmp(each, name))
            return 1;
    return 0;
}

int slurm_spank_task_init(spank_t spank, int argc, char *argv[])
{
    char root[] = "/tmp/container-XXXXXX", line[4096], *equals;
    if (!image)
        return 0;
    if (unshare(CLONE_NEWNS) || !mkdtemp(root))
        return -1;
    pid_t child = fork();
    if (child == 0) {
        execl("/bin/bash", "bash", script, root, image, mounts, home ? "home" : "", NULL);
        _exit(1);
    }
    int status;
    if (waitpid(child, &status, 0) < 0 || status) {
        slurm_error("container: could not start %s with %s", image, mounts);
        return -1;
    }
    if (chroot(root) || chdir("/"))
        return -1;
    FILE *file = fopen("/opt/weft/environment", "r");
    while (file && fgets(line, sizeof line, file)) {
        line[strcspn(line, "\n")] = 0;
        if ((equals = strchr(line, '='))) {
            *equals = 0;
            if (!is_kept(line))
                spank_setenv(spank, line, equals + 1, 1);
        }
    }
    return 0;
}
