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
{{- printf "%s:%d" .Values.service.bindAddress (int .Values.service.grpcPort) -}}
{{- else if not .Values.sameHost.hostPath -}}
{{- fail "no client could reach it: set tls.enabled, sameHost.hostPath or, for tests, insecure" -}}
{{- end -}}
{{- end -}}

{{/* Longer than preStop and drain together, or the drain would be cut short. */}}
{{- define "mla-server.gracePeriod" -}}
{{- $drain := div (add (int .Values.config.server.drain_deadline_ms) 999) 1000 -}}
{{- $moves := 0 -}}
{{- if include "mla-server.peers" . -}}
{{- $moves = add (int .Values.handOver.seconds) (int .Values.handOver.lingerSeconds) -}}
{{- end -}}
{{- add (int .Values.preStopSeconds) $moves $drain 10 -}}
{{- end -}}

{{/* The name that stands first in the certificate. */}}
{{- define "mla-server.serverName" -}}
{{- $name := printf "%s.%s.svc" (include "mla-server.fullname" .) .Release.Namespace -}}
{{- default $name .Values.tls.serverName -}}
{{- end -}}

{{/* Addresses of all pods, separated by commas; empty: nothing is handed over. */}}
{{- define "mla-server.peers" -}}
{{- if and .Values.handOver.enabled .Values.tls.enabled (gt (int .Values.replicas) 1) -}}
{{- $name := include "mla-server.fullname" . -}}
{{- $domain := printf "%s.%s.svc:%d" $name .Release.Namespace (int .Values.service.grpcPort) -}}
{{- $all := list -}}
{{- range $i := until (int .Values.replicas) -}}
{{- $all = append $all (printf "%s-%d.%s" $name $i $domain) -}}
{{- end -}}
{{- join "," $all -}}
{{- end -}}
{{- end -}}

{{/* The server's file: .Values.config, with the other pods among the operators. */}}
{{- define "mla-server.config" -}}
{{- $config := deepCopy .Values.config -}}
{{- if include "mla-server.peers" . -}}
{{- $server := get $config "server" -}}
{{- $named := "" -}}
{{- if hasKey $server "operators" -}}
{{- $named = get $server "operators" -}}
{{- end -}}
{{- $own := include "mla-server.serverName" . -}}
{{- $_ := set $server "operators" (ternary $own (printf "%s,%s" $named $own) (eq $named "")) -}}
{{- end -}}
{{- toYaml $config -}}
{{- end -}}

{{/*
What of .Values.config needs another pod. The keys left out are those that a running server takes over
(docs/configuration.md); a test compares the lists.
*/}}
{{- define "mla-server.fixedConfig" -}}
{{- $config := deepCopy .Values.config -}}
{{- $live := list "server.operators" "server.plain_operators" "server.drain_deadline_ms" -}}
{{- $live = concat $live (list "server.unhealthy_after_ms" "server.restart_after_ms" "log.level") -}}
{{- $live = concat $live (list "limits.sequence_lease_ms" "limits.model_lease_ms") -}}
{{- $live = concat $live (list "limits.step_lease_ms") -}}
{{- range $key := $live -}}
{{- $parts := splitList "." $key -}}
{{- $section := index $parts 0 -}}
{{- if hasKey $config $section -}}
{{- $_ := set $config $section (omit (get $config $section) (index $parts 1)) -}}
{{- end -}}
{{- end -}}
{{- if hasKey $config "tenants" -}}
{{- $_ := set $config "tenants" (pick (get $config "tenants") "metrics") -}}
{{- end -}}
{{- range $section := list "server" "log" "limits" "tenants" -}}
{{- if hasKey $config $section -}}
{{- if not (get $config $section) -}}
{{- $_ := unset $config $section -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- toYaml $config -}}
{{- end -}}

{{/* The service whose addresses are those of the pods that are ready. */}}
{{- define "mla-server.members" -}}
{{- printf "%s-members" (include "mla-server.fullname" .) -}}
{{- end }}
