/* SPDX-License-Identifier: Apache-2.0 */
#include "graph.h"

#include "gate.h"
#include "host_function.h"

#include <stdlib.h>
#include <string.h>

struct CUuserObject_st {
    unsigned int refs;
    void *pointer;
    CUhostFn destroy;
};

struct CUgraphExec_st {
    /* The handle and every launch that has not run yet. */
    unsigned int refs;
    struct parts parts;
};

/* Guards the counts of references and the lists. Releases are called without it. */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static void drop_node(CUgraphNode node) {
    pthread_mutex_lock(&lock);
    bool last = --node->refs == 0;
    pthread_mutex_unlock(&lock);
    if (!last)
        return;
    if (node->work.release != NULL)
        node->work.release(node->work.argument);
    free(node);
}

static void drop_object(CUuserObject object, unsigned int count) {
    pthread_mutex_lock(&lock);
    object->refs -= count;
    bool last = object->refs == 0;
    pthread_mutex_unlock(&lock);
    if (!last)
        return;
    object->destroy(object->pointer);
    free(object);
}

static void drop_parts(struct parts *parts) {
    for (size_t i = 0; i < parts->node_count; i++)
        drop_node(parts->nodes[i]);
    for (size_t i = 0; i < parts->object_count; i++)
        drop_object(parts->objects[i].object, parts->objects[i].count);
    free(parts->nodes);
    free(parts->objects);
}

static void *copied(const void *from, size_t bytes) {
    void *copy = malloc(bytes ? bytes : 1);
    if (bytes > 0)
        memcpy(copy, from, bytes);
    return copy;
}

static void copy_parts(struct parts *to, const struct parts *from) {
    pthread_mutex_lock(&lock);
    *to = *from;
    to->nodes = copied(from->nodes, from->node_count * sizeof *from->nodes);
    to->objects = copied(from->objects, from->object_count * sizeof *from->objects);
    for (size_t i = 0; i < to->node_count; i++)
        to->nodes[i]->refs++;
    for (size_t i = 0; i < to->object_count; i++)
        to->objects[i].object->refs += to->objects[i].count;
    pthread_mutex_unlock(&lock);
}

CUgraph graph_make(void) { return calloc(1, sizeof(struct CUgraph_st)); }

CUgraphNode graph_add(CUgraph graph, struct work work) {
    CUgraphNode node = calloc(1, sizeof *node);
    node->refs = 1;
    node->work = work;
    pthread_mutex_lock(&lock);
    struct parts *parts = &graph->parts;
    parts->nodes = realloc(parts->nodes, (parts->node_count + 1) * sizeof *parts->nodes);
    parts->nodes[parts->node_count++] = node;
    pthread_mutex_unlock(&lock);
    return node;
}

void graph_drop(CUgraph graph) {
    drop_parts(&graph->parts);
    free(graph);
}

static void run_exec(void *argument) {
    CUgraphExec exec = argument;
    for (size_t i = 0; i < exec->parts.node_count; i++)
        if (exec->parts.nodes[i]->work.run != NULL)
            exec->parts.nodes[i]->work.run(exec->parts.nodes[i]->work.argument);
}

static void drop_exec(void *argument) {
    CUgraphExec exec = argument;
    pthread_mutex_lock(&lock);
    bool last = --exec->refs == 0;
    pthread_mutex_unlock(&lock);
    if (!last)
        return;
    drop_parts(&exec->parts);
    free(exec);
}

/* ---- entry points ----------------------------------------------------------------------------- */

CUresult cuGraphCreate(CUgraph *graph, unsigned int flags) {
    API_CALL();
    if (graph == NULL || flags != 0)
        return CUDA_ERROR_INVALID_VALUE;
    *graph = graph_make();
    return CUDA_SUCCESS;
}

CUresult cuGraphDestroy(CUgraph graph) {
    API_CALL();
    if (graph == NULL)
        return CUDA_ERROR_INVALID_VALUE;
    graph_drop(graph);
    return CUDA_SUCCESS;
}

CUresult cuGraphAddHostNode(CUgraphNode *node, CUgraph graph, const CUgraphNode *dependencies,
                            size_t count, const CUDA_HOST_NODE_PARAMS *parameters) {
    API_CALL();
    (void)dependencies;
    (void)count;
    if (node == NULL || graph == NULL || parameters == NULL || parameters->fn == NULL)
        return CUDA_ERROR_INVALID_VALUE;
    *node = graph_add(graph, host_function(parameters->fn, parameters->userData));
    return CUDA_SUCCESS;
}

CUresult cuGraphAddEmptyNode(CUgraphNode *node, CUgraph graph, const CUgraphNode *dependencies,
                             size_t count) {
    API_CALL();
    (void)dependencies;
    (void)count;
    if (node == NULL || graph == NULL)
        return CUDA_ERROR_INVALID_VALUE;
    *node = graph_add(graph, (struct work){.type = CU_GRAPH_NODE_TYPE_EMPTY});
    return CUDA_SUCCESS;
}

CUresult cuGraphGetNodes(CUgraph graph, CUgraphNode *nodes, size_t *count) {
    API_CALL();
    if (graph == NULL || count == NULL)
        return CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&lock);
    for (size_t i = 0; nodes != NULL && i < *count; i++)
        nodes[i] = i < graph->parts.node_count ? graph->parts.nodes[i] : NULL;
    if (nodes == NULL || *count > graph->parts.node_count)
        *count = graph->parts.node_count;
    pthread_mutex_unlock(&lock);
    return CUDA_SUCCESS;
}

CUresult cuGraphNodeGetType(CUgraphNode node, CUgraphNodeType *type) {
    API_CALL();
    if (node == NULL || type == NULL)
        return CUDA_ERROR_INVALID_VALUE;
    *type = node->work.type;
    return CUDA_SUCCESS;
}

CUresult cuGraphInstantiateWithFlags(CUgraphExec *exec, CUgraph graph, unsigned long long flags) {
    API_CALL();
    (void)flags;
    if (exec == NULL || graph == NULL)
        return CUDA_ERROR_INVALID_VALUE;
    *exec = calloc(1, sizeof **exec);
    (*exec)->refs = 1;
    copy_parts(&(*exec)->parts, &graph->parts);
    return CUDA_SUCCESS;
}

CUresult cuGraphUpload(CUgraphExec exec, CUstream stream) {
    API_CALL();
    if (exec == NULL)
        return CUDA_ERROR_INVALID_VALUE;
    return stream_submit(stream, (struct work){.type = CU_GRAPH_NODE_TYPE_EMPTY});
}

CUresult cuGraphLaunch(CUgraphExec exec, CUstream stream) {
    API_CALL();
    if (exec == NULL)
        return CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&lock);
    exec->refs++;
    pthread_mutex_unlock(&lock);
    CUresult result =
        stream_submit(stream, (struct work){run_exec, exec, drop_exec, CU_GRAPH_NODE_TYPE_GRAPH});
    if (result != CUDA_SUCCESS)
        drop_exec(exec);
    return result;
}

CUresult cuGraphExecDestroy(CUgraphExec exec) {
    API_CALL();
    if (exec == NULL)
        return CUDA_ERROR_INVALID_VALUE;
    drop_exec(exec);
    return CUDA_SUCCESS;
}

CUresult cuUserObjectCreate(CUuserObject *object, void *pointer, CUhostFn destroy,
                            unsigned int references, unsigned int flags) {
    API_CALL();
    /* CU_USER_OBJECT_NO_DESTRUCTOR_SYNC is compulsory. */
    if (object == NULL || destroy == NULL || references == 0 || flags != 1)
        return CUDA_ERROR_INVALID_VALUE;
    *object = calloc(1, sizeof **object);
    **object = (struct CUuserObject_st){references, pointer, destroy};
    return CUDA_SUCCESS;
}

CUresult cuUserObjectRetain(CUuserObject object, unsigned int count) {
    API_CALL();
    if (object == NULL || count == 0)
        return CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&lock);
    object->refs += count;
    pthread_mutex_unlock(&lock);
    return CUDA_SUCCESS;
}

CUresult cuUserObjectRelease(CUuserObject object, unsigned int count) {
    API_CALL();
    if (object == NULL || count == 0)
        return CUDA_ERROR_INVALID_VALUE;
    drop_object(object, count);
    return CUDA_SUCCESS;
}

CUresult cuGraphRetainUserObject(CUgraph graph, CUuserObject object, unsigned int count,
                                 unsigned int flags) {
    API_CALL();
    if (graph == NULL || object == NULL || count == 0 || flags > 1)
        return CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&lock);
    struct parts *parts = &graph->parts;
    parts->objects = realloc(parts->objects, (parts->object_count + 1) * sizeof *parts->objects);
    parts->objects[parts->object_count++] = (struct kept){object, count};
    /* CU_GRAPH_USER_OBJECT_MOVE: the caller's references become the graph's. */
    if (flags == 0)
        object->refs += count;
    pthread_mutex_unlock(&lock);
    return CUDA_SUCCESS;
}

CUresult cuGraphReleaseUserObject(CUgraph graph, CUuserObject object, unsigned int count) {
    API_CALL();
    if (graph == NULL || object == NULL || count == 0)
        return CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&lock);
    struct parts *parts = &graph->parts;
    bool found = false;
    for (size_t i = 0; i < parts->object_count && !found; i++)
        if (parts->objects[i].object == object && parts->objects[i].count == count) {
            parts->objects[i] = parts->objects[--parts->object_count];
            found = true;
        }
    pthread_mutex_unlock(&lock);
    if (found)
        drop_object(object, count);
    return found ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}
