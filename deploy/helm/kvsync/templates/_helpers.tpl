{{- define "kvsync.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 63 | trimSuffix "-" }}
{{- end }}

{{- /* 40 characters at most: suffixes follow, and a name of a Service has 63. */}}
{{- define "kvsync.fullname" -}}
{{- if .Values.fullnameOverride }}
{{- .Values.fullnameOverride | trunc 40 | trimSuffix "-" }}
{{- else if contains (include "kvsync.name" .) .Release.Name }}
{{- .Release.Name | trunc 40 | trimSuffix "-" }}
{{- else }}
{{- printf "%s-%s" .Release.Name (include "kvsync.name" .) | trunc 40 | trimSuffix "-" }}
{{- end }}
{{- end }}

{{- define "kvsync.selectorLabels" -}}
app.kubernetes.io/name: {{ include "kvsync.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/component: gateway
{{- end }}

{{- define "kvsync.labels" -}}
{{ include "kvsync.selectorLabels" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- end }}

{{- define "kvsync.envoySelectorLabels" -}}
app.kubernetes.io/name: {{ include "kvsync.name" . }}-envoy
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/component: envoy
{{- end }}

{{- define "kvsync.envoyLabels" -}}
{{ include "kvsync.envoySelectorLabels" . }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- end }}

{{- define "kvsync.image" -}}
{{- with .Values.image }}
{{- if .digest }}{{ .repository }}@{{ .digest }}
{{- else }}{{ .repository }}:{{ default $.Chart.AppVersion .tag }}
{{- end }}
{{- end }}
{{- end }}

{{- define "kvsync.serviceAccountName" -}}
{{- if .Values.serviceAccount.create }}
{{- default (include "kvsync.fullname" .) .Values.serviceAccount.name }}
{{- else }}
{{- default "default" .Values.serviceAccount.name }}
{{- end }}
{{- end }}

{{- /* Roles stand in the namespaces of engines, or in none: releases of one name in two namespaces must not share theirs. */}}
{{- define "kvsync.roleName" -}}
{{- printf "%s-%s" .Release.Namespace (include "kvsync.fullname" .) }}
{{- end }}

{{- /* The ports of requests that are open: the data port, Envoy's questions. */}}
{{- define "kvsync.doors" -}}
{{- if dig "gateway" "enabled" true .Values.config }}http {{ end }}
{{- if dig "extproc" "enabled" false .Values.config }}extproc{{ end }}
{{- end }}

{{- define "kvsync.extprocPort" -}}
{{- dig "extproc" "port" 50052 .Values.config | int }}
{{- end }}

{{- define "kvsync.adminScheme" -}}
{{- if dig "admin" "tls" "cert" "" .Values.config }}HTTPS{{ else }}HTTP{{ end }}
{{- end }}

{{- /* Mebibytes that a pod with these settings may come to take: docs/deploy.md, "Sizes". */}}
{{- define "kvsync.memory" -}}
{{- $config := .Values.config }}
{{- $index := dig "index" "max_bytes" 4294967296 $config | int64 }}
{{- $events := dig "events" "receive_bytes" 268435456 $config | int64 }}
{{- $remote := dig "tokenizer" "remote" "cache_bytes" 67108864 $config | int64 }}
{{- $local := dig "tokenizer" "local" "cache_bytes" 67108864 $config | int64 }}
{{- $bytes := add (div (mul $index 11) 10) $events $remote $local }}
{{- add 384 (div (add $bytes 1048575) 1048576) }}Mi
{{- end }}

{{- /* The settings of a pod. Several replicas without Redis don't start their replays at one moment: half a second for each. */}}
{{- define "kvsync.config" -}}
{{- $config := deepCopy .Values.config }}
{{- $replicas := ternary .Values.autoscaling.maxReplicas .Values.replicas .Values.autoscaling.enabled | int }}
{{- $redis := dig "redis" "url" "" $config }}
{{- range .Values.env }}{{ if eq .name "REDIS_HOST" }}{{ $redis = .name }}{{ end }}{{ end }}
{{- $events := default dict $config.events }}
{{- if and (gt $replicas 1) (not $redis) (not (hasKey $events "replay_spread")) }}
{{- $_ := set $config "events" (set $events "replay_spread" (minf 60 (divf $replicas 2))) }}
{{- end }}
{{- toYaml $config }}
{{- end }}

{{- /* What a pod does not follow while it runs: when this changes, pods are made anew. */}}
{{- define "kvsync.restartsWith" -}}
{{- $config := omit (deepCopy .Values.config) "models" "tenants" }}
{{- with $config.events }}{{ $_ := set $config "events" (omit . "enabled") }}{{ end }}
{{- toJson $config | sha256sum }}
{{- end }}
