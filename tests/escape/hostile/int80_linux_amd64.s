// SPDX-License-Identifier: Apache-2.0

#include "textflag.h"

// func int80(number uintptr) uintptr
TEXT ·int80(SB), NOSPLIT, $0-16
	MOVQ number+0(FP), AX
	XORL BX, BX
	XORL CX, CX
	XORL DX, DX
	INT  $0x80
	MOVQ AX, ret+8(FP)
	RET
