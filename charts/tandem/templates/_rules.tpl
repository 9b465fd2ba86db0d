{{/*
What the operator may do where it looks after ModelServices, and why. There are no wildcards; Secrets are read by name, never
listed; nothing runs inside pods. docs/install.md#rights tells the same, tests/charts hold the two to what the code calls.
*/}}
{{- define "tandem.rules" -}}
# The resources themselves: it reads what people write, and writes finalizers and status.
- apiGroups: [tandem.dev]
  resources: [modelservices]
  verbs: [get, list, watch, patch]
- apiGroups: [tandem.dev]
  resources: [workerpools]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [tandem.dev]
  resources: [modelservices/status, workerpools/status, workerpools/scale]
  verbs: [get, patch]
# Clusters that check owner references want the right to block the owner's deletion.
- apiGroups: [tandem.dev]
  resources: [modelservices/finalizers]
  verbs: [update]
# Gateways, workers, Redis.
- apiGroups: [apps]
  resources: [deployments]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [apps]
  resources: [deployments/scale]
  verbs: [get, patch]
- apiGroups: [""]
  resources: [services]
  verbs: [get, list, watch, create, patch, delete]
# Why pods do not come up; which one goes first when there are to be fewer.
- apiGroups: [""]
  resources: [pods]
  verbs: [get, list, watch, patch]
# Passwords and keys that it makes for a service; whether those that a service names are there.
- apiGroups: [""]
  resources: [secrets]
  verbs: [get, create]
- apiGroups: [policy]
  resources: [poddisruptionbudgets]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [networking.k8s.io]
  resources: [networkpolicies]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [gateway.networking.k8s.io]
  resources: [httproutes]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [monitoring.coreos.com]
  resources: [podmonitors]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [""]
  resources: [events]
  verbs: [create, patch]
{{- end -}}
