{{/* What all names begin with: with a worker's name behind it at most 63 characters. */}}
{{- define "dynamo.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 34 | trimSuffix "-" -}}
{{- else -}}
{{- $name := default .Chart.Name .Values.nameOverride -}}
{{- if contains $name .Release.Name -}}
{{- .Release.Name | trunc 34 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name $name | trunc 34 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* Labels that never change: what selectors go by. */}}
{{- define "dynamo.selector" -}}
app.kubernetes.io/name: {{ default .Chart.Name .Values.nameOverride }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "dynamo.labels" -}}
{{ include "dynamo.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- end -}}

{{- define "dynamo.serviceAccount" -}}
{{- if .Values.serviceAccount.create -}}
{{- default (include "dynamo.fullname" .) .Values.serviceAccount.name -}}
{{- else -}}
{{- default "default" .Values.serviceAccount.name -}}
{{- end -}}
{{- end -}}

{{/* "true" where processes talk to the API server. */}}
{{- define "dynamo.usesKubernetes" -}}
{{- if eq (dig "discovery" "use" "memory" .Values.config) "kubernetes" }}true{{ end -}}
{{- end -}}

{{/* The whole dynamo.yaml: what the chart has to know, under what the user says. */}}
{{- define "dynamo.config" -}}
{{- $workers := dict -}}
{{- range $name, $worker := .Values.workers -}}
{{- $_ := set $workers $name (mergeOverwrite (dict "system_host" "0.0.0.0" "system_port" 9090) (deepCopy $worker.config)) -}}
{{- end -}}
{{- $own := dict "frontend" (dict "host" "0.0.0.0" "port" 8000) "admin" (dict "host" "0.0.0.0" "port" 9090) -}}
{{- mergeOverwrite $own (deepCopy .Values.config) (dict "workers" $workers) | toYaml -}}
{{- end -}}

{{/* The ports of the servers that a config names, as a JSON list: those of its addresses, or where the kind of server listens. */}}
{{- define "dynamo.serverPorts" -}}
{{- $listens := dict "nats" "4222" "redis" "6379" "etcd" "2379" "kubernetes" "443" -}}
{{- $ports := list -}}
{{- range $section := list (dig "transport" dict .) (dig "discovery" dict .) (dig "admission" "shared" dict .) -}}
{{- $default := get $listens (dig "use" "redis" $section) -}}
{{- range $address := concat (dig "servers" list $section) (dig "endpoints" list $section) (list (dig "url" "" $section)) -}}
{{- if $address -}}
{{- $ports = append $ports (regexFind ":[0-9]+/?$" $address | trimPrefix ":" | trimSuffix "/" | default $default) -}}
{{- end -}}
{{- end -}}
{{- if and (eq (dig "use" "" $section) "kubernetes") (not (dig "url" "" $section)) -}}
{{- $ports = concat $ports (list "443" "6443") -}}
{{- end -}}
{{- end -}}
{{- $numbers := list -}}
{{- range $ports | uniq | sortAlpha -}}{{- if . -}}{{- $numbers = append $numbers (int .) -}}{{- end -}}{{- end -}}
{{- toJson $numbers -}}
{{- end -}}

{{/* Seconds from SIGTERM to SIGKILL: what the part takes at most by its own deadlines, and ten for the rest. */}}
{{- define "dynamo.terminationSeconds" -}}
{{- ceil (addf (dig .grace 5 .map) (dig "shutdown_timeout" 30 .map) 10) | int -}}
{{- end -}}

{{/* The settings of a part: `pod`, then `workerDefaults` for workers, then the part's own. Maps are merged, lists replaced. */}}
{{- define "dynamo.settings" -}}
{{- $settings := deepCopy .root.Values.pod -}}
{{- range .layers -}}
{{- $settings = mergeOverwrite $settings (deepCopy .) -}}
{{- end -}}
{{- toYaml $settings -}}
{{- end -}}

{{/*
Deployment, PodDisruptionBudget and HorizontalPodAutoscaler of a part.
root, name (of the objects), component, labels (further ones, for the selector), settings, args, ports (a list of name and
number; "system" answers probes), started and ready (the paths that say that it has started, and that it can serve),
terminationSeconds
*/}}
{{- define "dynamo.part" -}}
{{- $root := .root -}}
{{- $settings := .settings -}}
apiVersion: apps/v1
kind: Deployment
metadata:
  name: {{ .name }}
  labels:
    {{- include "dynamo.labels" $root | nindent 4 }}
    {{- toYaml .labels | nindent 4 }}
spec:
  {{- if not $settings.autoscaling.enabled }}
  replicas: {{ $settings.replicas }}
  {{- end }}
  selector:
    matchLabels:
      {{- include "dynamo.selector" $root | nindent 6 }}
      {{- toYaml .labels | nindent 6 }}
  strategy:
    type: RollingUpdate
    rollingUpdate:
      {{- toYaml $settings.rollingUpdate | nindent 6 }}
  template:
    metadata:
      labels:
        {{- with $settings.labels }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
        {{- include "dynamo.selector" $root | nindent 8 }}
        {{- toYaml .labels | nindent 8 }}
      annotations:
        # A changed config is a new pod.
        checksum/config: {{ include "dynamo.config" $root | sha256sum }}
        {{- with $settings.annotations }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
    spec:
      serviceAccountName: {{ include "dynamo.serviceAccount" $root }}
      automountServiceAccountToken: {{ include "dynamo.usesKubernetes" $root | default "false" }}
      # Variables of other Services could begin with DYN_, and an unknown one of these is an error of the configuration.
      enableServiceLinks: false
      terminationGracePeriodSeconds: {{ .terminationSeconds }}
      {{- with $root.Values.imagePullSecrets }}
      imagePullSecrets:
        {{- toYaml . | nindent 8 }}
      {{- end }}
      securityContext:
        runAsNonRoot: true
        runAsUser: 10001
        runAsGroup: 10001
        fsGroup: 10001
        seccompProfile: {type: RuntimeDefault}
      containers:
        - name: {{ .component }}
          image: {{ printf "%s:%s" $root.Values.image.repository (default $root.Chart.AppVersion $root.Values.image.tag) | quote }}
          imagePullPolicy: {{ $root.Values.image.pullPolicy }}
          args: {{ toJson .args }}
          env:
            - name: POD_NAME
              valueFrom: {fieldRef: {fieldPath: metadata.name}}
            - name: POD_IP
              valueFrom: {fieldRef: {fieldPath: status.podIP}}
            {{- range $variable, $source := $root.Values.secrets }}
            - name: {{ $variable }}
              valueFrom: {secretKeyRef: {name: {{ $source.secret }}, key: {{ $source.key }}}}
            {{- end }}
            {{- with $settings.env }}
            {{- toYaml . | nindent 12 }}
            {{- end }}
          {{- with $settings.envFrom }}
          envFrom:
            {{- toYaml . | nindent 12 }}
          {{- end }}
          ports:
            {{- range .ports }}
            - {name: {{ .name }}, containerPort: {{ .number }}}
            {{- end }}
          startupProbe:
            httpGet: {path: {{ .started }}, port: system}
            periodSeconds: 5
            timeoutSeconds: 3
            failureThreshold: {{ divf $settings.startupSeconds 5 | ceil | int }}
          # So patient that a part that is ending is never killed for saying so.
          livenessProbe:
            httpGet: {path: /live, port: system}
            periodSeconds: 10
            timeoutSeconds: 5
            failureThreshold: {{ divf .terminationSeconds 10 | ceil | int | add 1 }}
          readinessProbe:
            httpGet: {path: {{ .ready }}, port: system}
            periodSeconds: 2
            timeoutSeconds: 2
            failureThreshold: 2
          {{- with $settings.resources }}
          resources:
            {{- toYaml . | nindent 12 }}
          {{- end }}
          securityContext:
            allowPrivilegeEscalation: false
            readOnlyRootFilesystem: true
            capabilities: {drop: [ALL]}
          volumeMounts:
            - {name: config, mountPath: /etc/dynamo, readOnly: true}
            - {name: cache, mountPath: /var/cache/dynamo}
            - {name: tmp, mountPath: /tmp}
            {{- with $settings.volumeMounts }}
            {{- toYaml . | nindent 12 }}
            {{- end }}
      volumes:
        - name: config
          configMap: {name: {{ include "dynamo.fullname" $root }}-config}
        - {name: cache, emptyDir: {}}
        - {name: tmp, emptyDir: {}}
        {{- with $settings.volumes }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
      {{- range $key := list "nodeSelector" "tolerations" "affinity" "topologySpreadConstraints" "priorityClassName" "runtimeClassName" }}
      {{- with index $settings $key }}
      {{ $key }}: {{ toJson . }}
      {{- end }}
      {{- end }}
{{- if $settings.podDisruptionBudget.enabled }}
---
apiVersion: policy/v1
kind: PodDisruptionBudget
metadata:
  name: {{ .name }}
  labels:
    {{- include "dynamo.labels" $root | nindent 4 }}
    {{- toYaml .labels | nindent 4 }}
spec:
  maxUnavailable: {{ $settings.podDisruptionBudget.maxUnavailable }}
  unhealthyPodEvictionPolicy: AlwaysAllow
  selector:
    matchLabels:
      {{- include "dynamo.selector" $root | nindent 6 }}
      {{- toYaml .labels | nindent 6 }}
{{- end }}
{{- if $settings.autoscaling.enabled }}
{{- if not $settings.autoscaling.metrics }}
{{- fail (printf "%s: autoscaling.metrics: name at least one metric to scale by" .name) }}
{{- end }}
---
apiVersion: autoscaling/v2
kind: HorizontalPodAutoscaler
metadata:
  name: {{ .name }}
  labels:
    {{- include "dynamo.labels" $root | nindent 4 }}
    {{- toYaml .labels | nindent 4 }}
spec:
  scaleTargetRef: {apiVersion: apps/v1, kind: Deployment, name: {{ .name }}}
  minReplicas: {{ $settings.autoscaling.minReplicas }}
  maxReplicas: {{ $settings.autoscaling.maxReplicas }}
  metrics:
    {{- toYaml $settings.autoscaling.metrics | nindent 4 }}
  {{- with $settings.autoscaling.behavior }}
  behavior:
    {{- toYaml . | nindent 4 }}
  {{- end }}
{{- end }}
{{- end -}}
