// SPDX-License-Identifier: Apache-2.0

// Package unixsocket makes sockets in directories of this user, whose paths may be longer than a socket address.
package unixsocket
