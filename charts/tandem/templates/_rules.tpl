{{/*
Rights of the operator in its namespaces, with reasons. There are no wildcards; Secrets are read by name, never
listed; nothing runs inside pods. docs/install.md has the same list, and tests compare it with the operator's requests to the API
server: nothing is missing, and nothing is left over.
*/}}
{{- define "tandem.rules" -}}
# What people write. The operator takes off the finalizer that former releases have set, and changes nothing else of it.
- apiGroups: [tandem.dev]
  resources: [modelservices]
  verbs: [list, watch, patch]
- apiGroups: [tandem.dev]
  resources: [modelgateways, modeladapters, modelcaches]
  verbs: [list, watch]
- apiGroups: [tandem.dev]
  resources: [modeladapters/status, modelcaches/status]
  verbs: [patch]
# Clusters that check owner references want the right to block the owner's deletion.
- apiGroups: [tandem.dev]
  resources: [modelservices/finalizers, modelgateways/finalizers, modelcaches/finalizers]
  verbs: [update]
- apiGroups: [tandem.dev]
  resources: [workerpools]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [tandem.dev]
  resources: [modelservices/status, modelgateways/status, workerpools/status, workerpools/scale]
  verbs: [patch]
# Workers, gateways, Redis, and what protects them. Server-side apply requires both create and patch.
- apiGroups: [apps]
  resources: [deployments]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [apps]
  resources: [deployments/scale]
  verbs: [patch]
# Workers of several pods, where that API is there.
- apiGroups: [leaderworkerset.x-k8s.io]
  resources: [leaderworkersets]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [leaderworkerset.x-k8s.io]
  resources: [leaderworkersets/scale]
  verbs: [patch]
- apiGroups: [""]
  resources: [services]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [policy]
  resources: [poddisruptionbudgets]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [networking.k8s.io]
  resources: [networkpolicies]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [gateway.networking.k8s.io]
  resources: [httproutes]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [inference.networking.k8s.io]
  resources: [inferencepools]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [monitoring.coreos.com]
  resources: [podmonitors]
  verbs: [get, list, watch, create, patch, delete]
# Why pods do not come up; and which of them goes first when there are to be fewer.
- apiGroups: [""]
  resources: [pods]
  verbs: [list, watch, patch]
# Keys and passwords that it makes for a service; whether those that a service names are there; and their copies in the
# Secret of a ModelGateway, which changes when services come and go.
- apiGroups: [""]
  resources: [secrets]
  verbs: [get, create, patch]
# The models file of a ModelGateway.
- apiGroups: [""]
  resources: [configmaps]
  verbs: [get, list, watch, create, patch]
# Downloads of ModelCaches, and the claims that it makes for them; it deletes none of these: they go with a ModelCache.
- apiGroups: [batch]
  resources: [jobs]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [""]
  resources: [persistentvolumeclaims]
  verbs: [get, list, watch, create, patch]
- apiGroups: [events.k8s.io]
  resources: [events]
  verbs: [create]
{{- end -}}
