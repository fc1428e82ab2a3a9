/* SPDX-License-Identifier: MIT
 *
 * device_words WORDS (TYPE PLATFORM NAME)…
 *
 * Prints the numbers of the devices that fit the words. Then prints the number of the device that
 * the words choose among them, -1 for the first. Prints the error if there is one.
 */
#include <stdio.h>
#include <string.h>

#include "opencl/words.h"

enum { MOST = 8 };

int
main(int count, char **arguments)
{
    static ca_device devices[MOST];
    const int listed = (count - 2) / 3;
    for (int i = 0; i < listed; i++) {
        char **facts = arguments + 2 + 3 * i;
        ca_device_info *info = &devices[i].info;
        info->type = strcmp(facts[0], "gpu") == 0           ? CA_DEVICE_GPU
                     : strcmp(facts[0], "accelerator") == 0 ? CA_DEVICE_ACCELERATOR
                                                            : CA_DEVICE_CPU;
        snprintf(info->platform, sizeof info->platform, "%s", facts[1]);
        snprintf(info->name, sizeof info->name, "%s", facts[2]);
    }
    ca_device_words request;
    CA_NEW_ERROR(error);
    if (ca_words_read(&request, arguments[1], "device", devices, listed, &error) != CA_OK) {
        puts(error.message);
        return 0;
    }
    for (int i = 0; i < listed; i++) {
        if (ca_words_fit(&request, &devices[i].info)) {
            printf("%d ", i);
        }
    }
    printf("of %ld%s\n", request.number, request.counts_usable ? " usable" : "");
    return 0;
}
