/* SPDX-License-Identifier: MIT
 *
 * The words that name a device: "cpu", "gpu:1", "1", "pocl", a part of a name.
 */
#ifndef CLATTN_OPENCL_WORDS_H
#define CLATTN_OPENCL_WORDS_H

#include "opencl/device.h" /* ca_device */

/* What words ask for. */
typedef struct {
    const char *name;   /* of a platform or device, or a part of one; NULL: a type or an index */
    int place;          /* where the name is looked for */
    int type;           /* a ca_device_type; -1: any */
    long number;        /* among the devices that fit; -1: the first usable one */
    bool counts_usable; /* `number` counts usable devices, as clattn.devices() does */
} ca_device_words;

/* Reads words. They are a type, perhaps with a number that counts all devices of the type; or an
   index; or a name in any case. A name is a platform's, or its short name, else a part of a
   platform's, else a device's, else a part of a device's. CA_ERROR_VALUE naming `what`, the words
   and the devices if a name fits devices of several platforms. `words` must outlive `request`. */
ca_status ca_words_read(ca_device_words *request, const char *words, const char *what,
                        const ca_device *devices, int count, ca_error *error);

/* True if the device is of the type, or has the name. */
bool ca_words_fit(const ca_device_words *request, const ca_device_info *info);

/* Returns the verdict on a name that fits no device, for ca_words_error. */
const char *ca_words_verdict(const char *name);

/* Sets CA_ERROR_VALUE: `what` 'words' `verdict`, and the list of the devices. */
ca_status ca_words_error(const char *verdict, const char *words, const char *what,
                         const ca_device *devices, int count, ca_error *error);

#endif
