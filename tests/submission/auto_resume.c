/* A stand-in for HyperPod's SPANK plugin: srun accepts --auto-resume, sbatch does not.
 *
 * What the option does is in the script AUTO_RESUME of auto_resume.py. */
#include <slurm/spank.h>

SPANK_PLUGIN(auto_resume, 1)

static int accept_value(int value, const char *argument, int remote)
{
    return 0;
}

static struct spank_option option = {
    "auto-resume", "0|1", "replace a node with a hardware fault", 1, 0, accept_value};

int slurm_spank_init(spank_t spank, int argc, char *argv[])
{
    /* The context of sbatch and salloc is the allocator's. */
    if (spank_context() == S_CTX_LOCAL || spank_context() == S_CTX_REMOTE)
        return spank_option_register(spank, &option);
    return 0;
}
