{{- define "mla-server.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 52 | trimSuffix "-" -}}
{{- else if contains .Chart.Name .Release.Name -}}
{{- .Release.Name | trunc 52 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name .Chart.Name | trunc 52 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{- define "mla-server.selectorLabels" -}}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "mla-server.labels" -}}
{{ include "mla-server.selectorLabels" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end -}}

{{- define "mla-server.serviceAccountName" -}}
{{- if .Values.serviceAccount.create -}}
{{- default (include "mla-server.fullname" .) .Values.serviceAccount.name -}}
{{- else -}}
{{- default "default" .Values.serviceAccount.name -}}
{{- end -}}
{{- end -}}

{{/* Address of the gRPC port; empty: no TCP. */}}
{{- define "mla-server.listen" -}}
{{- if or .Values.tls.enabled .Values.insecure -}}
{{- printf "0.0.0.0:%d" (int .Values.service.grpcPort) -}}
{{- else if not .Values.sameHost.hostPath -}}
{{- fail "no client could reach it: set tls.enabled, sameHost.hostPath or, for tests, insecure" -}}
{{- end -}}
{{- end -}}

{{/* Longer than preStop and drain together, or the drain would be cut short. */}}
{{- define "mla-server.gracePeriod" -}}
{{- $drain := div (add (int .Values.config.server.drain_deadline_ms) 999) 1000 -}}
{{- add (int .Values.preStopSeconds) $drain 10 -}}
{{- end -}}
