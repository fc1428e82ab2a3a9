/* SPDX-License-Identifier: MIT
 *
 * Large copies go in pieces: one is on its way while the host copies the next.
 */
#include "opencl/staging.h"

#include <string.h>

#include "opencl/pending.h"

#define PIECE      ((size_t)1 << 20) /* bytes */
#define SEND_RING  (8 * PIECE)
#define FETCHED    4 /* pieces on their way at once */
#define FETCH_RING (FETCHED * PIECE)
#define ALIGNMENT  ((size_t)128)

/* ---- pinned memory ---- */

/* Under its lock: is it there? It is asked for once. */
static bool
pinned_is_there(ca_device *device, ca_pinned *pinned, size_t bytes)
{
    const ca_cl *cl = device->cl;
    cl_int code = CL_SUCCESS;
    if (pinned->address != NULL || pinned->refused) {
        return pinned->address != NULL;
    }
    cl_mem buffer = cl->clCreateBuffer(
        device->context, CL_MEM_READ_WRITE | CL_MEM_ALLOC_HOST_PTR, bytes, NULL, &code);
    if (code == CL_SUCCESS) {
        void *address = cl->clEnqueueMapBuffer(device->queue, buffer, CL_TRUE,
                                               CL_MAP_READ | CL_MAP_WRITE, 0, bytes, 0,
                                               NULL, NULL, &code);
        if (code == CL_SUCCESS) {
            pinned->buffer = buffer;
            pinned->address = address;
        } else {
            cl->clReleaseMemObject(buffer);
        }
    }
    pinned->refused = pinned->address == NULL;
    return !pinned->refused;
}

static void
pinned_free(ca_device *device, ca_pinned *pinned)
{
    const ca_cl *cl = device->cl;
    if (pinned->address != NULL) {
        cl->clEnqueueUnmapMemObject(device->queue, pinned->buffer, pinned->address, 0,
                                    NULL, NULL);
        cl->clReleaseMemObject(pinned->buffer);
    }
    pinned->buffer = NULL;
    pinned->address = NULL;
    pinned->refused = false;
}

/* ---- sending ---- */

static ca_staged_part *
part_of(ca_staging *staging, uint64_t number)
{
    return &staging->parts[number % CA_STAGED_PARTS];
}

static void
wait_for_oldest(ca_device *device)
{
    ca_staging *staging = &device->staging;
    const ca_staged_part *part = part_of(staging, staging->first++);
    ca_pending_await(device, part->ticket);
    staging->from = part->end;
}

/* Where so many bytes are free, side by side, when enough of the oldest are through. */
static uint64_t
find_room(ca_device *device, size_t bytes)
{
    ca_staging *staging = &device->staging;
    uint64_t begin = staging->to;
    if (begin % SEND_RING + bytes > SEND_RING) {
        begin += SEND_RING - begin % SEND_RING;
    }
    while (staging->first < staging->next &&
           (begin + bytes - staging->from > SEND_RING ||
            staging->next - staging->first == CA_STAGED_PARTS)) {
        wait_for_oldest(device);
    }
    return begin;
}

/* One piece, of which a pending call is made. */
static ca_status
send_piece(ca_storage *storage, cl_command_queue queue, size_t offset,
           const void *source, size_t bytes, const char *call, ca_error *error)
{
    ca_device *device = storage->device;
    ca_staging *staging = &device->staging;
    cl_event event = NULL;
    uint64_t begin = find_room(device, bytes);
    char *place = staging->sending.address + begin % SEND_RING;
    memcpy(place, source, bytes);
    ca_pending_make_room(device);

    ca_mutex_lock(&device->lock);
    cl_int code = device->cl->clEnqueueWriteBuffer(
        queue, storage->buffer, CL_FALSE, offset, bytes, place, 0, NULL, &event);
    if (code == CL_SUCCESS) {
        const ca_pending_call pending = {event, call, NULL};
        uint64_t ticket = ca_pending_add(device, &pending);
        storage->ticket = ticket;
        staging->to = begin + (bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
        *part_of(staging, staging->next++) = (ca_staged_part){staging->to, ticket};
        code = device->cl->clFlush(queue);
    }
    ca_mutex_unlock(&device->lock);
    return code == CL_SUCCESS ? CA_OK
                              : ca_cl_error_set(error, code, "clEnqueueWriteBuffer",
                                                device->info.name);
}

static ca_status
send_plain(ca_storage *storage, cl_command_queue queue, size_t offset,
           const void *source, size_t bytes, ca_error *error)
{
    ca_device *device = storage->device;
    cl_int code = device->cl->clEnqueueWriteBuffer(
        queue, storage->buffer, CL_TRUE, offset, bytes, source, 0, NULL, NULL);
    return code == CL_SUCCESS ? CA_OK
                              : ca_cl_error_set(error, code, "clEnqueueWriteBuffer",
                                                device->info.name);
}

ca_status
ca_staging_write(ca_storage *storage, cl_command_queue queue, size_t offset,
                 const void *source, size_t bytes, const char *call, ca_error *error)
{
    ca_status status = CA_OK;
    ca_device *device = storage->device;
    ca_pinned *pinned = &device->staging.sending;
    ca_mutex_lock(&pinned->lock);
    bool staged = pinned_is_there(device, pinned, SEND_RING);
    for (size_t sent = 0; staged && sent < bytes && status == CA_OK; sent += PIECE) {
        size_t piece = bytes - sent < PIECE ? bytes - sent : PIECE;
        status = send_piece(storage, queue, offset + sent, (const char *)source + sent,
                            piece, call, error);
    }
    ca_mutex_unlock(&pinned->lock);
    if (!staged) {
        status = send_plain(storage, queue, offset, source, bytes, error);
    }
    return status;
}

/* ---- fetching ---- */

static cl_int
fetch_plain(ca_storage *storage, cl_command_queue queue, size_t offset, void *target,
            size_t bytes)
{
    return storage->device->cl->clEnqueueReadBuffer(
        queue, storage->buffer, CL_TRUE, offset, bytes, target, 0, NULL, NULL);
}

/* Piece i goes through place i % FETCHED, which piece i - FETCHED has left before. */
static cl_int
fetch_pieces(ca_storage *storage, cl_command_queue queue, size_t offset, char *target,
             size_t bytes)
{
    ca_device *device = storage->device;
    const ca_cl *cl = device->cl;
    char *places = device->staging.fetching.address;
    cl_event events[FETCHED] = {NULL};
    cl_int code = CL_SUCCESS;
    for (size_t ahead = 0; ahead < bytes + FETCH_RING; ahead += PIECE) {
        size_t place = ahead / PIECE % FETCHED;
        if (events[place] != NULL) {
            size_t start = ahead - FETCH_RING;
            cl_int waited = cl->clWaitForEvents(1, &events[place]);
            cl->clReleaseEvent(events[place]);
            events[place] = NULL;
            code = code == CL_SUCCESS ? waited : code;
            if (code == CL_SUCCESS) {
                memcpy(target + start, places + place * PIECE,
                       bytes - start < PIECE ? bytes - start : PIECE);
            }
        }
        if (ahead < bytes && code == CL_SUCCESS) {
            size_t piece = bytes - ahead < PIECE ? bytes - ahead : PIECE;
            code = cl->clEnqueueReadBuffer(
                queue, storage->buffer, CL_FALSE, offset + ahead, piece,
                places + place * PIECE, 0, NULL, &events[place]);
            if (code == CL_SUCCESS) {
                code = cl->clFlush(queue);
            } else {
                events[place] = NULL;
            }
        }
    }
    return code;
}

ca_status
ca_staging_read(ca_storage *storage, cl_command_queue queue, size_t offset,
                void *target, size_t bytes, ca_error *error)
{
    ca_device *device = storage->device;
    ca_pinned *pinned = &device->staging.fetching;
    cl_int code = CL_SUCCESS;
    bool staged = bytes >= CA_STAGED_BYTES;
    if (staged) {
        ca_mutex_lock(&pinned->lock);
        staged = pinned_is_there(device, pinned, FETCH_RING);
        code = staged ? fetch_pieces(storage, queue, offset, target, bytes) : code;
        ca_mutex_unlock(&pinned->lock);
    }
    if (!staged) {
        code = fetch_plain(storage, queue, offset, target, bytes);
    }
    return code == CL_SUCCESS
               ? CA_OK
               : ca_cl_error_set(error, code, "clEnqueueReadBuffer", device->info.name);
}

void
ca_staging_free(ca_device *device)
{
    ca_staging *staging = &device->staging;
    ca_mutex_lock(&staging->sending.lock);
    while (staging->first < staging->next) {
        wait_for_oldest(device);
    }
    pinned_free(device, &staging->sending);
    ca_mutex_unlock(&staging->sending.lock);

    ca_mutex_lock(&staging->fetching.lock);
    pinned_free(device, &staging->fetching);
    ca_mutex_unlock(&staging->fetching.lock);
}
