/* placeholder */
#include "testing.h"
#include "kernel_suite.h"
int main(void)
{
    return run_kernel_suite(&(kernel_suite){.title = "kernels, metal",
                                                  .backend = bml_backend_metal(),
                                                  .seed = 7,
                                                  .packer = bml_backend_cpu()});
}
