{{- define "twolane.name" -}}
{{- .Release.Name | trunc 52 | trimSuffix "-" -}}
{{- end -}}

{{- define "twolane.selector" -}}
app.kubernetes.io/name: twolane
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "twolane.labels" -}}
{{ include "twolane.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- end -}}

{{- define "twolane.metadata" -}}
name: {{ include "twolane.name" . }}
namespace: {{ .Release.Namespace }}
labels:
  {{- include "twolane.labels" . | nindent 2 }}
{{- end -}}

{{- define "twolane.image" -}}
{{- $kind := ternary "cuda" "cpu" (gt (int .Values.gpus) 0) -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default (printf "%s-%s" .Chart.AppVersion $kind) }}
{{- end -}}

{{- /* The --config file: what the chart sets, replaced by the options of the values. */ -}}
{{- define "twolane.options" -}}
{{- $set := dict "model" .Values.model "host" "0.0.0.0" "port" (int .Values.port) -}}
{{- $_ := set $set "drain-seconds" (int .Values.drainSeconds) -}}
{{- $_ := set $set "metrics-prefix" .Values.metricsPrefix -}}
{{- $_ := set $set "device" (ternary "cuda" "cpu" (gt (int .Values.gpus) 0)) -}}
{{- if gt (int .Values.gpus) 1 -}}
{{- $_ := set $set "tensor-parallel-size" (int .Values.gpus) -}}
{{- end -}}
{{- if .Values.kvEvents.enabled -}}
{{- $_ := set $set "kv-events-endpoint" (printf "tcp://*:%d" (int .Values.kvEvents.port)) -}}
{{- $_ := set $set "kv-events-replay-endpoint" (printf "tcp://*:%d" (int .Values.kvEvents.replayPort)) -}}
{{- end -}}
{{- range $name, $value := .Values.options -}}
{{- /* Helm reads numbers as floats, and would write 2000000 as 2e+06. */ -}}
{{- $whole := and (kindIs "float64" $value) (eq (float64 $value) (floor $value)) -}}
{{- $_ := set $set $name (ternary (int64 $value) $value $whole) -}}
{{- end -}}
{{- toYaml $set -}}
{{- end -}}
