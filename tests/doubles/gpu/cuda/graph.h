/* SPDX-License-Identifier: Apache-2.0 */
/* Graphs: nodes in an order in which they can run, objects that they keep alive. */
#ifndef SIMCUDA_GRAPH_H
#define SIMCUDA_GRAPH_H

#include "stream.h"

struct CUgraphNode_st {
    unsigned int refs;
    struct work work;
    /* Another captured node comes after it. */
    bool followed;
};

/* Nodes and user objects; each graph and each executable one has its own list of shared ones. */
struct parts {
    CUgraphNode *nodes;
    size_t node_count;
    struct kept {
        CUuserObject object;
        unsigned int count;
    } *objects;
    size_t object_count;
};

struct CUgraph_st {
    struct parts parts;
};

/* Adds a node; it comes after all that were added before, so the order is one that respects every
   dependency. (Branches that could run side by side run one after another.) */
CUgraphNode graph_add(CUgraph graph, struct work work);
CUgraph graph_make(void);
void graph_drop(CUgraph graph);

#endif
