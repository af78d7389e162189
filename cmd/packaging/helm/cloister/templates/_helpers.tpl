{{/* SPDX-License-Identifier: Apache-2.0 */}}

{{- define "cloister.name" -}}
{{- $n := .Release.Name }}
{{- if not (contains "cloister" $n) }}{{ $n = printf "%s-cloister" $n }}{{ end }}
{{- $n | trunc 50 | trimSuffix "-" }}
{{- end }}

{{- define "cloister.selector" -}}
app.kubernetes.io/name: cloister
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "cloister.labels" -}}
{{ include "cloister.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end }}

{{/* The image of a component: its own, or else the one of all. */}}
{{- define "cloister.image" -}}
{{- $image := .Values.image }}
{{- if and (eq .component "head") (eq .Values.mode "farm") .Values.headImage.repository }}{{ $image = .Values.headImage }}{{ end }}
{{- if $image.digest -}}
{{ $image.repository }}@{{ $image.digest }}
{{- else -}}
{{ $image.repository }}:{{ $image.tag | default .Chart.AppVersion }}
{{- end }}
{{- end }}

{{/* What does not fit together, and a schema cannot say. */}}
{{- define "cloister.check" -}}
{{- if eq .Values.mode "join" }}
{{- if not .Values.scheduler.url }}{{ fail "scheduler.url: state where workers take actions from, as grpc://scheduler.buildbarn:8983; or choose mode serve or farm" }}{{ end }}
{{- else }}
{{- if .Values.scheduler.url }}{{ fail (printf "scheduler.url is of mode join, and this is mode %s" .Values.mode) }}{{ end }}
{{- end }}
{{- if and (eq .Values.mode "serve") (ne .Values.autoscaling.kind "none") }}{{ fail "autoscaling: a single server cannot be scaled; choose mode farm" }}{{ end }}
{{- if and (eq .Values.autoscaling.kind "hpa") (lt (int .Values.autoscaling.min) 1) }}{{ fail "autoscaling.min: a HorizontalPodAutoscaler needs 1 at least; keda can do with 0" }}{{ end }}
{{- if gt (int .Values.autoscaling.min) (int .Values.autoscaling.max) }}{{ fail "autoscaling: min is more than max" }}{{ end }}
{{- if and .Values.tls.clientCA (not .Values.tls.secretName) }}{{ fail "tls.clientCA: needs tls.secretName" }}{{ end }}
{{- if and .Values.auth.secretName (not .Values.tls.secretName) }}{{ fail "auth.secretName: needs tls.secretName, since tokens must not be read on the way" }}{{ end }}
{{- if eq .Values.mode "farm" }}
{{- if .Values.tls.clientCA }}{{ fail "tls.clientCA: workers of this chart show a token, and no certificate; use auth.secretName alone" }}{{ end }}
{{- if and .Values.auth.secretName (not .Values.workers.tokenSecretName) }}{{ fail "auth.secretName: workers are callers, too; state workers.tokenSecretName, whose token has the right to work" }}{{ end }}
{{- end }}
{{- if and .Values.workers.tokenSecretName (eq .Values.mode "farm") (not .Values.tls.secretName) }}{{ fail "workers.tokenSecretName: needs tls.secretName, since a token must not be read on the way" }}{{ end }}
{{- if and .Values.cas.tokenSecretName (not (hasPrefix "grpcs://" .Values.cas.url)) }}{{ fail "cas.tokenSecretName: needs cas.url with grpcs://, since a token must not be read on the way" }}{{ end }}
{{- end }}

{{/* Whether a component executes actions, for which it needs what makes a sandbox; "" if not, as the head of a farm. */}}
{{- define "cloister.executes" -}}
{{- if not (and (eq .component "head") (eq .Values.mode "farm")) }}yes{{ end }}
{{- end }}

{{/* The parts of a pod that head and workers have in common. Called with the root and .component, .settings. */}}
{{- define "cloister.pod" -}}
serviceAccountName: {{ include "cloister.name" . }}
automountServiceAccountToken: false
{{- with .Values.imagePullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- if .Values.userNamespaces }}
hostUsers: false
{{- end }}
# A minute more than running actions have, for answers that are still on their way.
terminationGracePeriodSeconds: {{ add .Values.drain.seconds 60 }}
securityContext:
  runAsNonRoot: true
  runAsUser: 65532
  runAsGroup: 65532
  fsGroup: 65532
  fsGroupChangePolicy: OnRootMismatch
  {{- if include "cloister.executes" . }}
  seccompProfile:
    {{- toYaml .Values.security.seccompProfile | nindent 4 }}
  appArmorProfile:
    {{- toYaml .Values.security.appArmorProfile | nindent 4 }}
  {{- else }}
  # The runtime's own, and that of AppArmor where the node has it.
  seccompProfile: {type: RuntimeDefault}
  {{- end }}
{{- with .settings.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .settings.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .settings.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- end }}

{{- define "cloister.container" -}}
image: {{ include "cloister.image" . }}
imagePullPolicy: {{ .Values.image.pullPolicy }}
command: [/usr/bin/cloister]
securityContext:
  {{- if not (include "cloister.executes" .) }}
  allowPrivilegeEscalation: false
  capabilities:
    drop: [ALL]
  {{- else if .Values.userNamespaces }}
  allowPrivilegeEscalation: false
  capabilities:
    drop: [ALL]
  # Where parts of /proc are masked, nobody can mount one of his own. What is masked belongs to the node's root, and
  # users of the pod are none of the node's.
  procMount: Unmasked
  {{- else }}
  # Kubernetes unmasks /proc in no other way. The process is no root all the same, and has no capability.
  privileged: true
  {{- end }}
resources:
  {{- toYaml .settings.resources | nindent 2 }}
# A store is looked through when it is opened, which takes longer after a crash.
startupProbe:
  httpGet: {path: /live, port: metrics}
  periodSeconds: 5
  failureThreshold: 60
livenessProbe:
  httpGet: {path: /live, port: metrics}
  periodSeconds: 20
  timeoutSeconds: 5
readinessProbe:
  httpGet: {path: /ready, port: metrics}
  periodSeconds: 5
  timeoutSeconds: 5
{{- $token := and (eq .component "worker") .Values.workers.tokenSecretName }}
{{- $casToken := and .Values.cas.url (eq .component (ternary "worker" "head" (eq .Values.mode "join"))) .Values.cas.tokenSecretName }}
{{- if or .Values.trust.secretName $token $casToken }}
env:
  {{- if .Values.trust.secretName }}
  - name: SSL_CERT_FILE
    value: /etc/cloister/trust/ca.crt
  {{- end }}
  {{- if $token }}
  - name: CLOISTER_TOKEN
    valueFrom:
      secretKeyRef: {name: {{ $token }}, key: token}
  {{- end }}
  {{- if $casToken }}
  - name: CLOISTER_CAS_TOKEN
    valueFrom:
      secretKeyRef: {name: {{ $casToken }}, key: token}
  {{- end }}
{{- end }}
{{- end }}
