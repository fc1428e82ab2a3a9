/* SPDX-License-Identifier: MIT */
#include "opencl/launched.h"

#include "opencl/device.h"

void
ca_launched_add(ca_device *device, const ca_launch *launch)
{
    ca_launched *launched = &device->launched;
    uint64_t thread = ca_thread_id();
    for (int i = 0; i < launch->nsteps; i++) {
        const ca_step *step = &launch->steps[i];
        uint64_t entry = launched->next++ % CA_MAX_LAUNCHED;
        launched->steps[entry].kernel = step->kernel;
        launched->steps[entry].thread = thread;
        launched->steps[entry].global_size = step->global_size;
        launched->steps[entry].local_size = step->local_size;
    }
}

int
ca_launched_take(ca_device *device, ca_launched_step steps[CA_MAX_LAUNCHED])
{
    ca_launched *launched = &device->launched;
    uint64_t thread = ca_thread_id();
    int count = 0;
    ca_mutex_lock(&device->lock);
    for (uint64_t n = 0; n < CA_MAX_LAUNCHED; n++) {
        uint64_t entry = (launched->next + n) % CA_MAX_LAUNCHED; /* the oldest first */
        const ca_kernel *kernel = launched->steps[entry].kernel;
        if (kernel != NULL && launched->steps[entry].thread == thread) {
            size_t groups = launched->steps[entry].global_size / launched->steps[entry].local_size;
            steps[count++] = (ca_launched_step){&kernel->spec, groups};
            launched->steps[entry].kernel = NULL;
        }
    }
    ca_mutex_unlock(&device->lock);
    return count;
}
