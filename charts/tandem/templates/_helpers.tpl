{{/* Name of everything: the release's, with "tandem" in it. */}}
{{- define "tandem.name" -}}
{{- if .Values.fullnameOverride -}}
{{ .Values.fullnameOverride }}
{{- else if contains "tandem" .Release.Name -}}
{{ .Release.Name | trunc 50 | trimSuffix "-" }}
{{- else -}}
{{ printf "%s-tandem" .Release.Name | trunc 50 | trimSuffix "-" }}
{{- end -}}
{{- end -}}

{{/* What never changes in a release's life. Network policies of ModelServices admit pods of component operator. */}}
{{- define "tandem.selector" -}}
app.kubernetes.io/name: tandem
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/component: operator
{{- end -}}

{{- define "tandem.labels" -}}
{{ include "tandem.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end -}}

{{- define "tandem.serviceAccount" -}}
{{- if .Values.serviceAccount.create -}}
{{ .Values.serviceAccount.name | default (include "tandem.name" .) }}
{{- else -}}
{{ required "serviceAccount.name: name the account to use, since serviceAccount.create is false" .Values.serviceAccount.name }}
{{- end -}}
{{- end -}}

{{- define "tandem.image" -}}
{{- if .Values.image.digest -}}
{{ .Values.image.repository }}@{{ .Values.image.digest }}
{{- else -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end -}}
{{- end -}}

{{/* JSON list of the operator's namespaces in scope Namespaces. */}}
{{- define "tandem.namespaces" -}}
{{- if and (eq .Values.scope "Cluster") .Values.namespaces -}}
{{- fail "namespaces: scope Cluster includes all of them; leave the list empty (--set namespaces=null), or set scope to Namespaces" -}}
{{- end -}}
{{- .Values.namespaces | default (list .Release.Namespace) | uniq | sortAlpha | toJson -}}
{{- end -}}

{{- define "tandem.podDisruptionBudgetApi" -}}
{{- if .Capabilities.APIVersions.Has "policy/v1" -}} policy/v1 {{- else -}} policy/v1beta1 {{- end -}}
{{- end -}}
