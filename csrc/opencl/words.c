/* SPDX-License-Identifier: MIT */
#include "opencl/words.h"

#include <ctype.h>
#include <stdlib.h>
#include <string.h>

#include "base/strbuf.h"

static const char *const type_words[] = {
    [CA_DEVICE_GPU] = "gpu",
    [CA_DEVICE_ACCELERATOR] = "accelerator",
    [CA_DEVICE_CPU] = "cpu",
};

/* The usual words for platforms. They name no device of another platform, such as PoCL's
   "Intel(R) Xeon(R)". */
static const struct {
    const char *word;
    const char *platform; /* a part of its name */
} short_names[] = {
    {"amd", "AMD"},
    {"intel", "Intel"},
    {"nvidia", "NVIDIA"},
    {"oclgrind", "Oclgrind"},
    {"pocl", "Portable Computing Language"},
};

/* Where a name is looked for. The first place that fits a device counts. */
enum { IS_PLATFORM, IN_PLATFORM, IS_DEVICE, IN_DEVICE, NOWHERE };

/* The number of letters of `part` with which `whole` begins, in any case. */
static size_t
same_letters(const char *whole, const char *part)
{
    size_t n = 0;
    while (part[n] != '\0' && tolower((unsigned char)whole[n]) == tolower((unsigned char)part[n])) {
        n++;
    }
    return n;
}

static bool
text_is(const char *whole, const char *text)
{
    const size_t length = strlen(text);
    return same_letters(whole, text) == length && whole[length] == '\0';
}

static bool
text_contains(const char *whole, const char *part)
{
    for (; *whole != '\0'; whole++) {
        if (part[same_letters(whole, part)] == '\0') {
            return true;
        }
    }
    return false;
}

/* The number that up to four digits say, -1 for other words. */
static long
number_of(const char *digits)
{
    const size_t length = strlen(digits);
    const bool is_number = length > 0 && length <= 4 && strspn(digits, "0123456789") == length;
    return is_number ? strtol(digits, NULL, 10) : -1;
}

/* The part of a platform's name that a short name stands for; NULL for other words. */
static const char *
platform_of(const char *short_name)
{
    for (size_t i = 0; i < sizeof short_names / sizeof short_names[0]; i++) {
        if (text_is(short_name, short_names[i].word)) {
            return short_names[i].platform;
        }
    }
    return NULL;
}

static bool
name_fits(const char *name, const ca_device_info *info, int place)
{
    const char *platform = platform_of(name);
    if (platform != NULL) {
        return place == IN_PLATFORM && text_contains(info->platform, platform);
    }
    switch (place) {
    case IS_PLATFORM:
        return text_is(info->platform, name);
    case IN_PLATFORM:
        return text_contains(info->platform, name);
    case IS_DEVICE:
        return text_is(info->name, name);
    case IN_DEVICE:
        return text_contains(info->name, name);
    default:
        return false;
    }
}

/* Finds the place where a name fits devices. */
static ca_status
find_place(ca_device_words *request, const char *what, const ca_device *devices, int count,
           ca_error *error)
{
    const ca_device_info *first = NULL;
    request->place = request->name[0] == '\0' ? NOWHERE : IS_PLATFORM;
    while (request->place < NOWHERE && first == NULL) {
        for (int i = 0; i < count; i++) {
            const ca_device_info *info = &devices[i].info;
            if (!name_fits(request->name, info, request->place)) {
                continue;
            }
            if (first != NULL && strcmp(first->platform, info->platform) != 0) {
                return ca_words_error("fits devices of several platforms", request->name, what,
                                      devices, count, error);
            }
            first = info;
        }
        request->place += first == NULL;
    }
    return CA_OK;
}

ca_status
ca_words_read(ca_device_words *request, const char *words, const char *what,
              const ca_device *devices, int count, ca_error *error)
{
    for (int type = 0; type <= CA_DEVICE_CPU; type++) {
        const size_t length = strlen(type_words[type]);
        if (same_letters(words, type_words[type]) < length) {
            continue;
        }
        const long number = words[length] == ':' ? number_of(words + length + 1) : -1;
        if (words[length] == '\0' || number >= 0) {
            *request = (ca_device_words){.type = type, .number = number};
            return CA_OK;
        }
    }
    const long index = number_of(words);
    *request = (ca_device_words){.type = -1, .number = index, .counts_usable = index >= 0};
    if (index >= 0) {
        return CA_OK;
    }
    request->name = words;
    return find_place(request, what, devices, count, error);
}

bool
ca_words_fit(const ca_device_words *request, const ca_device_info *info)
{
    return request->name != NULL ? name_fits(request->name, info, request->place)
                                 : request->type < 0 || info->type == (ca_device_type)request->type;
}

const char *
ca_words_verdict(const char *name)
{
    return platform_of(name) == NULL ? "names no OpenCL device"
                                     : "names a platform that has no OpenCL device";
}

ca_status
ca_words_error(const char *verdict, const char *words, const char *what, const ca_device *devices,
               int count, ca_error *error)
{
    ca_strbuf list = {0};
    for (int i = 0; i < count; i++) {
        const ca_device_info *info = &devices[i].info;
        ca_strbuf_append(&list, "%s%s '%s' (%s)", i > 0 ? ", " : "", type_words[info->type],
                         info->name, info->platform);
    }
    const bool is_number = words[0] != '\0' && words[strspn(words, "-0123456789")] == '\0';
    const char *quote = is_number ? "" : "'";
    ca_status status = ca_error_set(error, CA_ERROR_VALUE, "%s %s%s%s %s; there are: %s", what,
                                    quote, words, quote, verdict, ca_strbuf_text(&list));
    ca_strbuf_free(&list);
    return status;
}
