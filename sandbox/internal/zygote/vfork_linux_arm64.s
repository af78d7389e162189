// SPDX-License-Identifier: Apache-2.0

#include "textflag.h"

// func vfork(flags uintptr, l *launch) (pid, errno uintptr)
//
// The child goes on below this frame and never leaves it, so that the parent finds all above as it was.
TEXT ·vfork(SB), NOSPLIT, $16-32
	MOVD flags+0(FP), R0
	MOVD ZR, R1
	MOVD ZR, R2
	MOVD ZR, R3
	MOVD ZR, R4
	MOVD $220, R8 // clone
	SVC
	CMN  $4095, R0
	BCS  failed
	CBNZ R0, parent
	MOVD l+8(FP), R0
	MOVD R0, 8(RSP)
	CALL ·becomeCommand(SB)
	BRK  // it does not return
parent:
	MOVD R0, pid+16(FP)
	MOVD ZR, errno+24(FP)
	RET
failed:
	NEG  R0, R0
	MOVD $-1, R1
	MOVD R1, pid+16(FP)
	MOVD R0, errno+24(FP)
	RET
