/* SPDX-License-Identifier: Apache-2.0 */
/* Carries out the requests of a device session and fills in their replies. device_session.h says
   what they are, device_session.c under which rules this code runs. */
#include "checksum.h"
#include "cuda/arena_blocks.h"
#include "cuda/arena_devices.h"
#include "cuda/device_calls.h"
#include "device_memory.h"
#include "device_serve.h"
#include "gate/page.h"

#include <errno.h>
#include <stdio.h>

#define ORDINAL_OF_POINTER 9 /* CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL */

void device_set_result(struct liveshift_device_reply *reply, int result, const char *message) {
    reply->result = result;
    if (result != 0)
        snprintf(reply->message, sizeof reply->message, "%s", message);
}

static struct arena_block *find_block(struct device_session *session, uint64_t address) {
    uint32_t used = blocks_used();
    for (uint32_t i = 0; i < used; i++) {
        uint32_t at = (session->found + i) % used;
        struct arena_block *block = block_by_index(at);
        if (atomic_load(&block->state) != BLOCK_NONE && atomic_load(&block->address) == address) {
            session->found = at;
            return block;
        }
    }
    return NULL;
}

static int sum_all(struct device_session *session, struct checksum *sum, uint64_t from,
                   uint64_t length) {
    int result = CUDA_OK;
    for (uint64_t done = 0; done < length && result == CUDA_OK;) {
        size_t piece = length - done < DEVICE_BUFFER ? (size_t)(length - done) : DEVICE_BUFFER;
        result = DEVICE_CALL(cuMemcpyDtoH_v2, session->buffer, from + done, piece);
        if (result == CUDA_OK)
            checksum_add(sum, session->buffer, piece);
        done += piece;
    }
    return result;
}

static void checksum(struct device_session *session, const struct liveshift_device_request *request,
                     struct liveshift_device_reply *reply) {
    uint64_t pieces = checksum_pieces(request->size, request->argument);
    struct checksum sum = checksum_begin(request->size, request->argument);
    int device = -1;
    int result = DEVICE_CALL(cuPointerGetAttribute, &device, ORDINAL_OF_POINTER, request->address);
    if (result == CUDA_OK)
        result = contexts_enter(&session->contexts, device, request->address);
    if (result != CUDA_OK) {
        device_set_result(reply, result, "no device of this process holds that memory");
        return;
    }
    if (pieces == 0)
        result = sum_all(session, &sum, request->address, request->size);
    for (uint64_t i = 0; i < pieces && result == CUDA_OK; i++)
        result = sum_all(session, &sum, request->address + checksum_piece(request->size, pieces, i),
                         LIVESHIFT_DEVICE_SAMPLE);
    reply->device = device;
    reply->value = checksum_of(&sum);
    device_set_result(reply, result, "copying that memory to the host failed");
}

/* Exports a block's memory. Memory that came back by MAP was made by another process, and driver 580
   does not export such memory again. The block gets a copy in memory that this process made. */
static int export_memory(struct device_session *session,
                         const struct liveshift_device_reply *reply) {
    int result = memory_export(reply->address, &session->descriptor);
    if (result == CUDA_OK)
        return result;
    if (contexts_enter(&session->contexts, reply->device, 0) != CUDA_OK ||
        memory_renew(reply->address, reply->size, reply->device, arena_accessors(reply->device)) !=
            CUDA_OK)
        return result;
    return memory_export(reply->address, &session->descriptor);
}

static void export_block(struct device_session *session, struct arena_block *block,
                         struct liveshift_device_reply *reply) {
    int result = export_memory(session, reply);
    if (result == CUDA_OK)
        atomic_store(&block->shared, 1);
    device_set_result(reply, result, "the driver gave no descriptor of it");
}

static void release_block(struct arena_block *block, struct liveshift_device_reply *reply) {
    /* Set before the unmapping: a thread that runs although it should be held then waits, too,
       before it unmaps the block (end_block in arena.c). */
    atomic_store(&block->released, 1);
    int result = memory_unmap(reply->address, reply->size);
    if (result != CUDA_OK)
        atomic_store(&block->released, 0);
    device_set_result(reply, result, "the driver did not unmap it");
}

static void map_block(struct device_session *session, struct arena_block *block, uint64_t size,
                      struct liveshift_device_reply *reply) {
    if (atomic_load(&block->released) == 0)
        device_set_result(reply, -EALREADY, "its memory is here");
    else if (size != reply->size)
        device_set_result(reply, -EINVAL, "the block has another size");
    else if (session->descriptor < 0)
        device_set_result(reply, -EBADF, "no descriptor came with the request");
    else {
        int result = contexts_enter(&session->contexts, reply->device, 0);
        if (result == CUDA_OK)
            result = memory_import(reply->address, size, reply->device,
                                   arena_accessors(reply->device), session->descriptor);
        if (result == CUDA_OK) {
            atomic_store(&block->shared, 1);
            atomic_store(&block->released, 0);
        }
        device_set_result(reply, result, "the driver did not map it");
    }
}

static void own_block(struct device_session *session, struct arena_block *block,
                      struct liveshift_device_reply *reply) {
    if (atomic_load(&block->shared) == 0)
        return;
    int result = contexts_enter(&session->contexts, reply->device, 0);
    if (result == CUDA_OK)
        result = memory_renew(reply->address, reply->size, reply->device,
                              arena_accessors(reply->device));
    if (result == CUDA_OK)
        atomic_store(&block->shared, 0);
    device_set_result(reply, result, "it could not be copied to memory of its own");
}

/* Carries out a request that concerns one block. */
static void with_block(struct device_session *session,
                       const struct liveshift_device_request *request,
                       struct liveshift_device_reply *reply) {
    struct arena_block *block = find_block(session, request->address);
    if (block == NULL) {
        device_set_result(reply, -ENOENT, "no block of the arena begins there");
    } else {
        reply->size = atomic_load(&block->size);
        reply->device = atomic_load(&block->device);
        reply->kind = LIVESHIFT_MEMORY_ARENA;
        if (request->op == LIVESHIFT_DEVICE_MAP)
            map_block(session, block, request->size, reply);
        else if (atomic_load(&block->released) != 0)
            device_set_result(reply, -EALREADY, "its memory was given up");
        else if (request->op == LIVESHIFT_DEVICE_EXPORT)
            export_block(session, block, reply);
        else if (request->op == LIVESHIFT_DEVICE_RELEASE)
            release_block(block, reply);
        else
            own_block(session, block, reply);
        reply->value = atomic_load(&block->released) == 0;
    }
}

static void synchronise(struct device_session *session, struct liveshift_device_reply *reply) {
    int many = 0, result = DEVICE_CALL(cuDeviceGetCount, &many);
    for (int device = 0; device < many && result == CUDA_OK; device++) {
        unsigned flags;
        int active = 0;
        result = DEVICE_CALL(cuDevicePrimaryCtxGetState, device, &flags, &active);
        if (result != CUDA_OK || active == 0)
            continue;
        result = contexts_enter(&session->contexts, device, 0);
        if (result == CUDA_OK)
            result = DEVICE_CALL(cuCtxSynchronize);
        reply->device = device;
    }
    device_set_result(reply, result, "waiting for the device's work failed");
}

void device_handle_request(struct device_session *session,
                           const struct liveshift_device_request *request,
                           struct liveshift_device_reply *reply) {
    switch (request->op) {
    case LIVESHIFT_DEVICE_NEXT:
        if (!device_list(&session->cursor, request->argument, reply))
            device_set_result(reply, -ENOENT, "there are no more allocations");
        break;
    case LIVESHIFT_DEVICE_CHECKSUM:
        checksum(session, request, reply);
        break;
    case LIVESHIFT_DEVICE_EXPORT:
    case LIVESHIFT_DEVICE_RELEASE:
    case LIVESHIFT_DEVICE_MAP:
    case LIVESHIFT_DEVICE_OWN:
        with_block(session, request, reply);
        break;
    case LIVESHIFT_DEVICE_SYNC:
        synchronise(session, reply);
        break;
    default:
        device_set_result(reply, -ENOSYS, "this process's interposer doesn't know that request");
    }
}
